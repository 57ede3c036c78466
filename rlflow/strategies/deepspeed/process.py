"""DeepSpeed's state of the process: its device, its log, and the ranks that it speaks to."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from rlflow.errors import UserError, importable
from rlflow.strategies.groups import RoleGroups


def join(device: torch.device, dtype: torch.dtype, backend: str | None) -> None:
    """Give DeepSpeed the process group that is there.

    Args:
        device: Of this rank.
        dtype: In which it trains.
        backend: Of the process group.

    Raises:
        UserError: This process has used DeepSpeed on another kind of device before, or it does not train in `dtype`.
    """
    with importable("deepspeed", "DeepSpeedStrategy"):
        import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    if (used := deepspeed.get_accelerator().device_name()) != device.type:
        raise UserError(
            f"the run is on the device {device}, and DeepSpeed was imported for `{used}` in this process,"
            " which it cannot change; start a new process"
        )
    if dtype == torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
        raise UserError(
            f"`precision` is 'fp16', in which DeepSpeed does not train on this machine's {device.type};"
            " set `strategy: fsdp`, or `precision: bf16`"
        )
    # It is for inference alone, and would be compiled first: a minute, or without end where a compile was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend)
    _keep_within_role()


def turn_to(groups: RoleGroups) -> None:
    """Make DeepSpeed speak to the ranks of one role: it has single places for them, whatever the engine."""
    from deepspeed.utils import groups as current

    current.mpu = groups
    current._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups.within


@cache
def _keep_within_role() -> None:
    """Where DeepSpeed speaks to all ranks of the job, which do not all hold the role, let it speak to the role's.

    ZeRO-3 does so twice: it waits for all ranks while it divides weights, and it compares with global rank 0 in what
    order a forward pass reads them.
    """
    from deepspeed import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.utils import groups

    everybody = comm.barrier

    def barrier(group: Any = None, **settings: Any) -> Any:
        return everybody(group or groups.mpu.all, **settings)

    def refuse_unlike(numbers: list[int]) -> None:
        # Ranks count the weights of all their roles, so only the differences are alike.
        digest = hash(tuple(number - numbers[0] for number in numbers))
        ends = torch.tensor([digest, -digest])
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX, groups.mpu.all)
        if int(ends[0]) != -int(ends[1]):
            raise RuntimeError("the ranks of a role read its weights in different orders")

    comm.barrier = barrier
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = refuse_unlike
