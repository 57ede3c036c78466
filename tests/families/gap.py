"""The gap between an engine's logprobs and those of training's packed forward, over three updates."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from rlflow.models.causal_lm import ScoringModel
from rlflow.models.packing import pack
from rlflow.rollout import Completion, RolloutEngine, Sampling
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged
from tests.rollout.trained import PROMPTS, STOP, perturb

LIMIT = 1e-5
SEEDS = list(range(len(PROMPTS)))


@torch.no_grad()
def gap(model: ScoringModel, completions: list[Completion]) -> float:
    """The largest difference between the engine's logprobs and training's packed forward, over all tokens."""
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    responses = torch.zeros(len(completions), int(lengths.max()), dtype=torch.int64)
    for row, completion in enumerate(completions):
        responses[row, : lengths[row]] = torch.tensor(completion.token_ids)
    rows = pack(TokenRows(Ragged.from_lists(PROMPTS), responses, lengths))
    logprobs: Tensor = model(*rows.arguments())[0]
    return float((logprobs - torch.tensor([x for completion in completions for x in completion.logprobs])).abs().max())


def tensors(model: ScoringModel) -> list[tuple[str, Tensor]]:
    """The tensors that a sync sends."""
    return [(weight.name, weight.parameter) for weight in model.weights()]


def follow_three_syncs(engine: RolloutEngine, model: ScoringModel) -> None:
    """Generate after each of three updates, which the logprobs of weights one update old would miss by far."""
    for version in range(3):
        stale = copy.deepcopy(model)
        perturb(model, version, scale=0.02)
        report = engine.update_weights([tensors(model)], version)
        assert report.tensors == len(tensors(model))
        completions = engine.generate(PROMPTS, SEEDS, Sampling(24, 1.0, STOP), version)
        assert gap(model, completions) < LIMIT
        assert gap(stale, completions) > 100 * LIMIT
