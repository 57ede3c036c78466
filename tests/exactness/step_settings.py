"""The ways to run a step: all of them, and a few in which each pair of choices occurs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from tests.strategies.strategy_update import Stage

SMALL, LARGE = 20, 4096  # token budgets: micro-batches of one or two samples, and all samples in one
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Setting:
    """Way in which a step is run; by the claim under test, it does not matter.

    Attributes:
        stage: Stage of ZeRO, or `fsdp`; None for a single process without either.
        token_budget: Largest number of tokens of a micro-batch.
        packing: Whether forward passes go without padding.
        balance: Whether rows move to even out tokens.
        seed: Seed of the run. It sets the order of the rows, and so the groups that each rank has.
        precision: Precision of the weights.
        share_prefixes: Whether rows share the tokens with which they begin, from the first one on.
        checkpointing: Whether layers are computed again in the backward pass.
    """

    stage: Stage | None
    token_budget: int = LARGE
    packing: bool = True
    balance: Literal["auto", "off"] = "auto"
    seed: int = 0
    precision: Literal["fp32", "fp64"] = "fp32"
    share_prefixes: bool = True
    checkpointing: bool = False


def _choices(stage: Literal[0, 1, 2, 3], ranks: int) -> Setting:
    """The other choices that make all pairs meet over all stages and ranks."""
    number = RANKS.index(ranks)
    return Setting(
        stage,
        (SMALL, LARGE)[(stage + number) % 2],
        packing=(stage + number // 2) % 2 == 0,
        balance="auto" if (stage // 2 + number) % 2 == 0 else "off",
        seed=(stage // 2 + number // 2 + stage) % 2,
        share_prefixes=(stage + 2 * number + 1) % 3 > 0,
    )


STAGES: tuple[Stage, ...] = (0, 1, 2, 3, "fsdp")
ZERO: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)

# By the number of ranks. In the cover every two choices of stage, ranks, budget, packing, balance and seed meet.
COVER = {ranks: [_choices(stage, ranks) for stage in ZERO] for ranks in RANKS}

# Every strategy, stage, budget and packing at every number of ranks; the other choices take turns.
GRID = {
    ranks: [
        Setting(
            stage,
            (SMALL, LARGE)[large],
            packing=packed == 1,
            balance="auto" if (number + large + packed) % 2 == 0 else "off",
            seed=(number // 2 + large) % 2,
        )
        for (number, stage), large, packed in product(enumerate(STAGES), range(2), range(2))
    ]
    for ranks in RANKS
}

PRODUCT = {
    ranks: [
        replace(setting, balance=balance)
        for setting in GRID[ranks]
        for balance in (("auto", "off") if ranks > 1 else ("auto",))
    ]
    for ranks in RANKS
}
