"""DeepSpeed's configuration of one role."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rlflow.models.optimizer import Optimizer
from rlflow.strategies.loss_scale import FIRST

PERSISTENT_ELEMENTS = 10_000  # ZeRO-3 keeps smaller parameters whole on every rank: norms and biases


class ZeRO(Protocol):
    """The settings of `DeepSpeedStrategy` that DeepSpeed is given; see there."""

    stage: Any
    dtype: torch.dtype
    offload_optimizer: bool
    offload_parameters: bool
    overlap_comm: bool
    bucket_elements: int
    live_elements: int | None
    partition_within: int | None


def configuration(settings: ZeRO, layer: int, ranks: int, on_gpu: bool, optimizer: Optimizer | None) -> dict[str, Any]:
    """DeepSpeed's configuration of one role; what it would do on its own (clip at 1.0, print, time) is off.

    Args:
        settings: Of the strategy.
        layer: Weights of the model's largest layer.
        ranks: Of the role.
        on_gpu: Where they train.
        optimizer: Of the role; None for a frozen one.
    """
    bucket = -2 * (-min(settings.bucket_elements, layer) // 2)  # its buffers are allocated in full; even, for NCCL
    live = layer if settings.live_elements is None else settings.live_elements
    zero: dict[str, Any] = {
        "stage": settings.stage,
        "memory_efficient_linear": False,  # it would replace torch's function in the whole process, for good
        "overlap_comm": settings.overlap_comm,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "sub_group_size": bucket,  # stepped at once, with temporary copies of this size
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    if settings.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    if settings.partition_within is not None and ranks > settings.partition_within:
        zero["zero_hpz_partition_size"] = settings.partition_within
    return {
        "train_micro_batch_size_per_gpu": 1,  # asked for, used for nothing
        "gradient_accumulation_steps": 1,  # the boundary is set by hand in `backward`
        "gradient_clipping": 0.0 if optimizer is None else optimizer.gradient_clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings.dtype == torch.bfloat16},
        "fp16": {"enabled": settings.dtype == torch.float16, "loss_scale": FIRST},  # set anew for each update
        "data_types": {"grad_accum_dtype": "fp32" if settings.stage else None},
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
