"""The error when memory runs out, in one line: the rank, its task, the memory in use, and settings that would help."""

from __future__ import annotations

import socket
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from rlflow.errors import UserError, named, one_line
from rlflow.models.handle import ModelHandle
from rlflow.rollout.engine import RolloutEngine
from rlflow.storage.space import in_bytes
from rlflow.strategies.strategy import TrainingStrategy

# Texts of torch, CUDA's libraries and vLLM when memory runs out and the class of the error does not say so
SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "OutOfMemoryError:",
    "MemoryError:",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "Cannot auto-fit max_model_len",
    "is less than desired GPU memory utilization",
    "is less than desired CPU memory utilization",
)
OWN = Path(__file__).parents[1]  # folder of the package
NOT_A_USERS = (OWN, OWN.parent / "algorithms", Path(sysconfig.get_path("stdlib")))
SHOWN = 240  # characters of the error that are repeated


@contextmanager
def memory_watched(doing: str, remedies: Callable[[], Sequence[str]], strategy: TrainingStrategy) -> Iterator[None]:
    """A context that turns an out-of-memory error into a `UserError` of one line.

    Args:
        doing: Text for the error that says what the rank was doing, such as "step 3, run rollout".
        remedies: Returns settings that would help, with their values; called after the error.
        strategy: Strategy of this rank.

    Raises:
        UserError: Memory ran out.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = _place(error)
        raise UserError(
            f"rank {strategy.global_rank} on {socket.gethostname()} ran out of memory: {doing}{place}"
            f" ({one_line(error)[:SHOWN]}); {_in_use(strategy.root_device)}. To take less: {'; '.join(remedies())}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or the machine."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in SIGNS)


def to_train(strategy: TrainingStrategy, handle: ModelHandle) -> list[str]:
    """Advice that lowers the memory of a trained role."""
    on_cpu = strategy.root_device.type == "cpu"
    recomputed = [] if handle.gradient_checkpointing else [named("set `gradient_checkpointing`", handle)]
    offloads = strategy.can_offload and strategy.stage and not on_cpu and not strategy.offload_optimizer
    offloaded = ["set `strategy.init_args.offload_optimizer`"] if offloads else []
    return [_smaller_batches(strategy), *recomputed, *_divided(strategy), *_shared_gpu(strategy), *offloaded]


def to_score(strategy: TrainingStrategy) -> list[str]:
    """Advice that lowers the memory of a role's forward passes."""
    return [_smaller_batches(strategy), *_divided(strategy), *_shared_gpu(strategy)]


def to_generate(strategy: TrainingStrategy, engine: RolloutEngine | None) -> list[str]:
    """Advice that lowers the memory of an engine; none where there is no engine."""
    return (
        []
        if engine is None
        else [named(each, engine) for each in engine.memory_settings(strategy.root_device.type == "cpu")]
    )


def to_load(strategy: TrainingStrategy) -> list[str]:
    """Advice that lowers the memory of loading roles."""
    fewer = ["take a smaller model, or train adapters (`lora`)", "place roles on ranks of their own (`placement`)"]
    shorter = ["set `strategy.init_args.precision: bf16`"] if strategy.dtype == torch.float32 else []
    return [*_divided(strategy), *_shared_gpu(strategy), *fewer, *shorter]


def to_hold_rows() -> list[str]:
    """Advice that lowers the memory of the step's values."""
    return [
        "lower `data.prompts_per_step` or `module.group_size`",
        "make fewer of them at a time in a node of your own",
    ]


def _smaller_batches(strategy: TrainingStrategy) -> str:
    return f"lower `strategy.init_args.token_budget` ({strategy.forward_plan.token_budget})"


def _divided(strategy: TrainingStrategy) -> list[str]:
    if strategy.stage is None:
        return ["take `DeepSpeedStrategy` on more ranks, which divides the weights"]
    return [f"raise `strategy.init_args.stage` ({strategy.stage}) to 3"] if strategy.stage < 3 else []


def _shared_gpu(strategy: TrainingStrategy) -> list[str]:
    if strategy.root_device.type != "cuda":
        return []
    return ["lower `rollout.init_args.gpu_memory_utilization` where an engine shares the GPU"]


def _in_use(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        here = torch.cuda.memory_allocated(device)
        return f"{in_bytes(here)} were in this rank's tensors, {in_bytes(free)} of the GPU's {in_bytes(total)} free"
    held, memory = psutil.Process().memory_info().rss, psutil.virtual_memory()
    return (
        f"this rank's process held {in_bytes(held)}, and {in_bytes(memory.available)} of the machine's"
        f" {in_bytes(memory.total)} were free"
    )


def _place(error: BaseException) -> str:
    """The line of the user's own code in which the error was raised; empty if it was in none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        of_others = "site-packages" in path.parts or any(map(path.is_relative_to, NOT_A_USERS))
        if not of_others and path.suffix == ".py":
            return f", {path.name}:{frame.lineno}"
    return ""
