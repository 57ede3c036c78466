"""One process with plain torch: for laptops, Macs, and float64 runs to which other strategies are compared."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import torch

from rlflow.models.handle import ForwardPlan
from rlflow.strategies.strategy import TrainingStrategy


class SingleProcess(TrainingStrategy):
    """Trains in this process without DeepSpeed; needs `trainer.devices: 1`.

    Args:
        precision: Precision of weights, gradients and optimizer states. There is no fp16, since its range is too small
            for an optimizer's states. For fp16 on one rank use FSDP, whose states are float32.
        token_budget: Maximum number of tokens in a micro-batch. A longer sequence gets its own micro-batch.
        packing: Run forward passes without padding. If off, rows are padded to the micro-batch's longest sequence.
        share_prefixes: Compute a prefix only once if several rows of a micro-batch share it, such as a group's prompt.
            Needs `packing`.
        float32_head: Compute logits in float32 even if weights and hidden states are not, in the rollout engine too.
    """

    precisions = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64})
    otherwise = "for fp16 use `strategy: fsdp`, which keeps an optimizer's states in float32, on one rank too"

    def __init__(
        self,
        precision: Literal["fp32", "bf16", "fp64"] = "fp32",
        token_budget: int = 4096,
        packing: bool = True,
        share_prefixes: bool = True,
        float32_head: bool = False,
    ) -> None:
        from rlflow.strategies.processes import OneProcess  # see `DistributedStrategy`

        self._configure(OneProcess(), precision, ForwardPlan(token_budget, packing, share_prefixes), float32_head)
