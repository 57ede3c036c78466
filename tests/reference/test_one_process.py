"""Models, micro-batches and the pure functions together, in float64 in one process, against the references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlflow.functional import (
    group_normalized_advantages,
    importance_weights,
    kl_estimate,
    loss_count,
    loss_sum,
    loss_weights,
    ppo_clip_loss,
)
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.strategies.single import SingleProcess
from rlflow.values.batch import Batch
from rlflow.values.ragged import Ragged
from tests.reference.policy_float64 import Folders, Objective, Sample, policy_update
from tests.reference.test_references import assert_same, padded, ragged_samples, write_model
from tests.reference.update import Step

LR = 0.1


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_an_update_of_grpo_in_any_micro_batches_is_that_of_the_reference(
    tmp_path: Path, packing: bool, token_budget: int, mode: str
) -> None:
    policy, reference = write_model(tmp_path / "policy", seed=0), write_model(tmp_path / "reference", seed=1)
    objective = Objective(clip_high=0.28, kl_coef=0.1, kl_kind="k3-ratio", temperature=0.8, loss_aggregation=mode)
    samples = ragged_samples()
    expected = policy_update(policy, samples, objective, Step(lr=LR), Folders(reference))

    strategy = SingleProcess("fp64", token_budget, packing)
    Fabric(accelerator="cpu", devices=1, strategy=strategy.processes).launch()
    optimizer = Optimizer(name="sgd", lr=LR, gradient_clipping=0.0)
    actor = CausalLM(str(policy), optimizer=optimizer, temperature=objective.temperature)
    frozen = CausalLM(str(reference), trainable=False, temperature=objective.temperature)
    strategy.setup_role("actor", actor, policy)
    strategy.setup_role("reference", frozen, reference)
    loss = backward(strategy, actor, frozen, samples, objective)
    gradient = {name: g.clone() for name, g in strategy.gradients("actor").items()}
    strategy.step("actor")

    assert_same(expected, loss, gradient, tolerance=1e-10)
    for bucket in strategy.weights("actor", 10_000):
        for name, weight in bucket:
            torch.testing.assert_close(weight, expected.after_sgd[name], rtol=0, atol=1e-12)


def backward(
    strategy: SingleProcess, actor: CausalLM, frozen: CausalLM, samples: list[Sample], objective: Objective
) -> float:
    """The backward passes of one update, micro-batch by micro-batch; the loss of the whole."""
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    advantages = group_normalized_advantages(rewards, torch.tensor([s.group for s in samples]))
    rows = rows_of(samples)
    ref_logprobs = frozen.logprobs(rows)
    total, parts = loss_count(rows.loss_mask, objective.loss_aggregation), actor.plan.split(rows)  # type: ignore[arg-type]
    loss = 0.0
    for index in parts:
        part = [samples[i] for i in index.tolist()]
        micro = rows_of(part)
        width = micro.response_ids.shape[1]
        with actor.training():
            logprobs = actor.logprobs(micro)
        old, rollout = logprobs_of(part)
        per_token = ppo_clip_loss(logprobs, old, advantages[index], objective.clip_low, objective.clip_high)
        per_token = per_token * importance_weights(old, rollout, micro.loss_mask)
        per_token = per_token + objective.kl_coef * kl_estimate(logprobs, ref_logprobs[index, :width], "k3-ratio", old)
        weights = loss_weights(micro.loss_mask, objective.loss_aggregation)  # type: ignore[arg-type]
        share = loss_sum(per_token, weights) / total
        strategy.backward("actor", share, last=index is parts[-1])
        loss += share.item()
    return loss


def rows_of(samples: list[Sample]) -> Batch:
    """The samples as a node sees them."""
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    mask = padded([[int(m) for m in s.mask] for s in samples]).bool()
    prompts = Ragged.from_lists([list(s.prompt_ids) for s in samples])
    return Batch(prompts, padded([list(s.response_ids) for s in samples]), mask, lengths, [{}] * len(samples))


def logprobs_of(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Old and rollout logprobs, `[B, T]` each."""
    return padded([s.old_logprobs for s in samples], 0.0), padded([s.rollout_logprobs for s in samples], 0.0)
