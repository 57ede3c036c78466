"""One process, plain torch: laptops, Macs, and the float64 runs that show the rest to be exact."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.strategies.roles import Role
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.strategies.update import clip_and_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class SingleProcess(TrainingStrategy):
    """Trains in this process without DeepSpeed; needs `trainer.devices: 1`.

    Args:
        precision: Of weights, gradients and optimizer states alike; so there is no fp16, whose range is too small for
            an optimizer's states (FSDP on one rank has float32 ones).
        token_budget: Tokens of a micro-batch; a longer sequence gets one of its own.
        packing: Forward passes without padding; off pads to the micro-batch's longest sequence.
        float32_head: Compute logits in float32 from weights and hidden states of less, in the rollout engine too.
    """

    def __init__(
        self,
        precision: Literal["fp32", "bf16", "fp64"] = "fp32",
        token_budget: int = 4096,
        packing: bool = True,
        float32_head: bool = False,
    ) -> None:
        given: str = precision
        if given == "fp16":
            raise UserError(
                "`precision` is 'fp16', and SingleProcess keeps an optimizer's states in it too, whose squares of"
                " gradients would be 0; use `strategy: fsdp`, which keeps them in float32, on one rank too"
            )
        if precision not in DTYPES:
            raise UserError(f"`precision` is {precision!r}; it is one of {', '.join(DTYPES)}.")
        from rlflow.strategies.processes import OneProcess  # see `DistributedStrategy`

        self._configure(OneProcess(), DTYPES[precision], token_budget, packing, float32_head)

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; see `TrainingStrategy.backward`."""
        loss.backward()

    def _wrap(self, name: str, role: Role) -> torch.nn.Module:
        return role.model

    def _update(self, name: str, role: Role, most: float) -> float:
        return clip_and_step(role, most)
