"""Run by ranks and by the reference: training of groups of weights with different settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlflow import checkpoint
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.module import RLModule
from rlflow.run.optimizers import configure_optimizers
from rlflow.run.prepare import configure
from rlflow.strategies import TrainingStrategy
from tests.checkpoint_files import write_checkpoint
from tests.strategies.reference import TEMPERATURE
from tests.strategies.state import Pieces, pieces
from tests.strategies.strategy_update import Outcome, Stage, all_weights, backward, launch, trained

CLIP = 0.5


def two_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices with a decay; norms and embeddings at another rate without one."""
    plain = [name for name in named if "norm" in name or "embed" in name]
    return [
        {"params": [parameter for name, parameter in named.items() if name not in plain]},
        {"params": [named[name] for name in plain], "lr": 0.002, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    ]


def adamw(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(named), lr=0.01, weight_decay=0.3)


def rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule for each group: the first falls by half each update, the second rises by its first value.

    It computes each rate from the one before it, so it goes wrong for good if that was changed in between.
    """
    factors = [lambda done: 0.5, lambda done: (done + 1) / done]
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, factors)


class Grouped(RLModule):
    """An actor whose optimizer is made as Lightning's documentation makes one."""

    def __init__(self, actor: CausalLM, scheduled: bool = False) -> None:
        self.actor, self.scheduled = actor, scheduled

    def configure_optimizers(self) -> Any:
        optimizer = adamw(dict(self.actor.named_parameters()))
        if not self.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates(optimizer), "interval": "step"}}


def grouped_role(strategy: TrainingStrategy, folder: Path, scheduled: bool = False, **settings: Any) -> CausalLM:
    """An actor with such an optimizer, set up as a run sets it up; `settings` are of `actor.optimizer`."""
    settings = {"gradient_clipping": CLIP, **settings}
    module = Grouped(CausalLM(str(folder), optimizer=Optimizer(**settings), temperature=TEMPERATURE), scheduled)
    configure(module)
    configure_optimizers(module, {"actor": folder}, strategy.dtype)
    strategy.setup_role("actor", module.actor, folder, updates=4)
    return module.actor


def grouped_updates(strategy: TrainingStrategy, folder: Path, updates: int, **settings: Any) -> Outcome:
    handle, outcome = grouped_role(strategy, folder, **settings), Outcome()
    for _ in range(updates):
        backward(strategy, "actor", handle)
        outcome.norms.append(strategy.step("actor"))
    outcome.weights = all_weights(strategy, "actor")
    return outcome


def on_ranks(folder: Path, stage: Stage, precision: str, updates: int, scheduled: bool) -> Outcome:
    return grouped_updates(launch(stage, precision), folder, updates, scheduled=scheduled)


def before_updates(folder: Path, stage: Stage, precision: str) -> Pieces:
    """This rank's state before the first update, with a rate and a decay that would be seen."""
    strategy = launch(stage, precision)
    strategy.setup_role("actor", trained(folder, Optimizer(lr=0.1, weight_decay=1.0)), folder)
    optimizer = strategy.roles["actor"].optimizer
    assert stage != 0 or not optimizer.state, "its first update would count as its second"  # type: ignore[union-attr]
    return [piece for piece in pieces(strategy) if piece[2] == "weight"]


def resumed(folder: Path, stage: Stage, precision: str, run_dir: Path) -> tuple[Pieces, Pieces]:
    """This rank's state after four scheduled updates; and after two, a checkpoint, and two more by a new process."""
    found = []
    for first in (4, 2):
        strategy = launch(stage, precision)
        handle = grouped_role(strategy, folder, scheduled=True)
        for _ in range(first):
            backward(strategy, "actor", handle)
            strategy.step("actor")
        if first == 2:
            write_checkpoint(strategy, run_dir, 2)
            strategy = launch(stage, precision)
            handle = grouped_role(strategy, folder, scheduled=True)
            checkpoint.restore(checkpoint.find("last", run_dir), strategy, ["actor"])  # type: ignore[arg-type]
            for _ in range(2):
                backward(strategy, "actor", handle)
                strategy.step("actor")
        found.append(pieces(strategy))
    return found[0], found[1]
