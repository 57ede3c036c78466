"""Run by the ranks of the tests with a second model: an average of the trained model, or a model to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlflow import checkpoint
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies import SingleProcess, TrainingStrategy
from rlflow.values.batch import TokenRows
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.checkpoint_files import write_checkpoint
from tests.strategies.reference import ROWS, TOKENS
from tests.strategies.state import Pieces
from tests.strategies.strategy_update import MICRO_BATCHES, Stage, all_weights, backward, launch, rows_of, trained

DECAY, STEPS = 0.75, 3
BOTH = ("actor", "teacher")
ADAMW = Optimizer("adamw", lr=1e-2, gradient_clipping=1.0)


@dataclass(frozen=True)
class Seen:
    """State of one rank after a step: its parts of the owner's and the average's weights, and the weights it reads."""

    owner: Pieces
    average: Pieces
    weights: dict[str, Tensor]


def launched(stage: Stage | None, precision: str, **settings: int) -> TrainingStrategy:
    return SingleProcess(precision) if stage is None else launch(stage, precision, **settings)  # type: ignore[arg-type]


def with_teacher(strategy: TrainingStrategy, folder: Path) -> tuple[CausalLM, CausalLM]:
    actor = trained(folder, ADAMW)
    teacher = actor.averaged(DECAY)
    strategy.setup_role("actor", actor, folder)
    strategy.setup_role("teacher", teacher, folder)
    return actor, teacher


def parts(strategy: TrainingStrategy, name: str) -> Pieces:
    return [
        (key, shape, kind, part.start, part.values.detach().clone().float())
        for key, shape, held in strategy.state_parts(name)
        for kind, part in held.items()
        if kind == "weight"
    ]


def seen(strategy: TrainingStrategy) -> Seen:
    return Seen(parts(strategy, "actor"), parts(strategy, "teacher"), all_weights(strategy, "teacher"))


def averaged_steps(
    folder: Path, stage: Stage | None, precision: str, target: Path | None, settings: dict[str, int]
) -> tuple[list[Seen], Tensor]:
    """Before any step and after each; and what the teacher scores at the end. A checkpoint is written after two."""
    strategy = launched(stage, precision, **settings)
    actor, teacher = with_teacher(strategy, folder)
    teacher.logprobs(rows_of([0]))  # so that ZeRO-3 has gathered what it keeps whole
    found = [seen(strategy)]
    for step in range(STEPS):
        backward(strategy, "actor", actor)
        strategy.step("actor")
        strategy.move_average("teacher")
        found.append(seen(strategy))
        if step == 1 and target is not None:
            write_checkpoint(strategy, target, step + 1, BOTH)
    return found, teacher.logprobs(rows_of([0, 1, 2]))


def third_step(folder: Path, stage: Stage | None, precision: str, target: Path) -> Seen:
    """The step after the checkpoint."""
    strategy = launched(stage, precision)
    actor, _ = with_teacher(strategy, folder)
    checkpoint.restore(checkpoint.find("last", target), strategy, BOTH)
    assert strategy.roles["teacher"].done == 2
    backward(strategy, "actor", actor)
    strategy.step("actor")
    strategy.move_average("teacher")
    return seen(strategy)


def kl_gradient(
    folder: Path, other: Path, stage: Stage | None, precision: str, layout: Layout | None
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of a loss of KLs to a frozen model after other prompts, and the KLs of this rank's rows."""
    strategy = launched(stage, precision, token_budget=20)
    if layout is not None:
        strategy.form_groups({"actor": layout, "other": layout})
    actor, frozen = trained(folder, ADAMW), CausalLM(str(other), trainable=False, temperature=1.3)
    strategy.setup_role("actor", actor, folder)
    strategy.setup_role("other", frozen, other)
    actor.reads_temperature = frozen.reads_temperature = True
    place = strategy.layout("actor")
    own = MICRO_BATCHES[place.shards][place.shard(strategy.global_rank)]
    every = [row for rows in own for row in rows]
    before = actor.kl(heated(every), frozen, given=prompts_of(every))  # ranks make equally many micro-batches
    likeliest, tokens = actor.topk(heated(every), 3)
    assert bool((likeliest[..., 0] >= actor.logprobs(heated(every))).all())
    torch.testing.assert_close(actor.logprobs_of(heated(every), tokens), likeliest, rtol=0, atol=1e-5)
    count = strategy.agree("actor", len(own))
    for number in range(count):
        rows = own[number] if number < len(own) else []
        weights = torch.tensor([ROWS[row][2] for row in rows])
        with actor.training():
            kl = actor.kl(heated(rows), frozen, given=prompts_of(rows))
            states = actor.hidden(rows_of(rows)).sum()
        loss = ((weights[:, None] * kl).sum() + 0.01 * states) / TOKENS
        strategy.backward("actor", loss, last=number == count - 1)
    whole = {key: value.clone() for key, value in strategy.gradients("actor").items()}
    return whole, before.detach().clone()


def heated(rows: list[int]) -> TokenRows:
    """The rows, each at a temperature of its own or at the model's."""
    found = rows_of(rows)
    temperature = torch.tensor([[0.0, 0.5, 2.0][row % 3] for row in rows], dtype=torch.float64)
    return TokenRows(found.prompt_ids, found.response_ids, found.lengths, {"temperature": temperature})


def prompts_of(rows: list[int]) -> Ragged:
    return Ragged.from_lists([[35 + row] * (1 + 5 * (row % 3)) for row in rows])
