"""Advantages and loss of each algorithm, as its nodes make them by default, equal the paper's.

Settings are the algorithm's defaults but for the number of epochs, so that there is a ratio, the importance weights,
which no paper has, and KL. Where a default is not the paper's, the test says what the difference comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow import CausalLM, RLModule, Rollout
from rlflow.algorithms import (
    CPGD,
    DPPO,
    GDPO,
    GMPO,
    GPG,
    GSPO,
    OPO,
    PPO,
    REINFORCE,
    SAPO,
    MaxRL,
    OffPolicySequenceMasking,
    OnPolicyDistillation,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusBaseline,
    ReMax,
)
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards import ExactMatch
from tests.reference.paper_batches import GROUP, LENGTHS, Batch, assert_rows, assert_tight
from tests.reference.paper_nodes import Step, scored_batch, step
from tests.reference.papers import (
    cpgd,
    deepseek_v32,
    distillation,
    dppo,
    gdpo,
    gmpo,
    gpg,
    gspo,
    maxrl,
    opo,
    ppo,
    reinforce,
    reinforce_plus_plus,
    remax,
    sapo,
)
from tests.reference.papers.ragged import gradient, mean, std, sum_of

BETA = 0.1
TWICE = {"epochs": 2}  # so that old logprobs are not those of the policy in training


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    return write_tiny_model(folder / "tiny", seed=1, hidden_size=32, intermediate_size=48, layers=1)


@pytest.fixture(scope="module")
def scored(policy: Path) -> tuple[Batch, Rollout]:
    return scored_batch(0, policy)


@pytest.fixture
def data(scored: tuple[Batch, Rollout]) -> Batch:
    return scored[0]


Run = Callable[..., Step]


@pytest.fixture
def run(scored: tuple[Batch, Rollout], policy: Path) -> Run:
    """One step of an algorithm; keywords that name nodes are their values, others are settings."""
    data, rollout = scored
    values = {"rollout": rollout, "rewards": data.rewards, "old_logprobs": data.log_old, "ref_logprobs": data.log_ref}

    def run(algorithm: type[RLModule], given: dict[str, Any] | None = None, **settings: Any) -> Step:
        settings = {"reward": ExactMatch("answer"), "group_size": GROUP, "importance": None} | settings
        return step(algorithm, policy, values | (given or {}), **settings)

    return run


def numbers(data: Batch, x: Tensor) -> list[list[float]]:
    return [row.tolist() for row in data.rows(x)]


def assert_advantages(data: Batch, found: Tensor, wanted: Sequence[Sequence[float]]) -> None:
    """`found` is `[B]` or `[B, T]`; `wanted` is for each token."""
    found = found[:, None].expand(data.mask.shape) if found.dim() == 1 else found
    assert_rows(data.rows(found), wanted)


def assert_loss(data: Batch, step: Step, theirs: Callable[[list[Tensor]], Tensor]) -> None:
    """Value and gradient to log pi."""
    assert_tight(step.loss, theirs(data.rows(data.log_pi)).detach())
    assert_gradient(data, step, theirs)


def assert_gradient(data: Batch, step: Step, theirs: Callable[[list[Tensor]], Tensor], scale: float = 1.0) -> None:
    """`scale` times the paper's."""
    wanted = gradient(theirs, data.rows(data.log_pi))
    assert_rows(data.rows(step.gradient), [[scale * g for g in row] for row in wanted])


def of_responses(advantages: Sequence[Sequence[float]]) -> list[float]:
    return [a for group in advantages for a in group]


def of_tokens(advantages: Sequence[float]) -> list[list[float]]:
    return [[a] * n for a, n in zip(advantages, LENGTHS, strict=True)]


def test_ppo_s_nodes_give_the_advantages_returns_and_loss_of_the_paper(run: Run, data: Batch) -> None:
    """GAE over the reward with its KL penalty; the advantages are whitened too, as in InstructGPT's code and no
    equation.
    """
    settings = {"lam": 0.9, "critic_lam": 0.95, "gamma": 0.97}
    made = run(PPO, {"values": data.A_t}, kl_coef=BETA, group_size=1, **settings, **TWICE)
    r = ppo.rewards_with_kl(data.rewards.tolist(), numbers(data, data.log_old), numbers(data, data.log_ref), BETA)
    A = [ppo.gae(r[i], V, 0.97, 0.9) for i, V in enumerate(numbers(data, data.A_t))]
    assert_advantages(data, made.values["estimates"].advantages, A)
    targets = [
        [a + v for a, v in zip(ppo.gae(r[i], V, 0.97, 0.95), V, strict=True)]
        for i, V in enumerate(numbers(data, data.A_t))
    ]
    assert_advantages(data, made.values["estimates"].returns, targets)
    whitened = reinforce_plus_plus.normalised(A, ddof=1)
    assert_advantages(data, made.values["advantages"], whitened)
    old = data.rows(data.log_old)
    assert_loss(data, made, lambda new: ppo.clip_loss(new, old, whitened, 0.2))


def test_gmpo_s_nodes_give_the_loss_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    made, old = run(GMPO, **TWICE), data.rows(data.log_old)
    assert_loss(data, made, lambda new: gmpo.loss(new, old, made.values["advantages"].tolist()))


def test_gspo_s_nodes_give_the_loss_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    made, old = run(GSPO, **TWICE), data.rows(data.log_old)
    assert_loss(data, made, lambda new: gspo.loss(new, old, made.values["advantages"].tolist(), 3e-4, 4e-4))


def test_gpg_s_nodes_give_the_advantages_and_loss_of_the_paper(run: Run, data: Batch) -> None:
    A = of_responses(gpg.advantages(data.groups(data.rewards)))
    made = run(GPG)
    assert_advantages(data, made.values["advantages"], of_tokens(A))
    assert_loss(data, made, lambda new: gpg.loss(new, A))


def test_opo_s_nodes_give_the_advantages_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    """The paper sums a response's tokens; the mean over the step's tokens is that times a number, in an exactly
    on-policy step.
    """
    lengths = data.lengths.reshape(-1, GROUP).tolist()
    A = of_responses([opo.advantages(r, n) for r, n in zip(data.groups(data.rewards), lengths, strict=True)])
    made = run(OPO)
    assert_advantages(data, made.values["advantages"], of_tokens(A))

    def theirs(new: list[Tensor]) -> Tensor:
        return -sum_of(a * sum_of(row) for a, row in zip(A, new, strict=True))

    assert_gradient(data, made, theirs, scale=1 / sum(LENGTHS))


def test_remax_s_nodes_give_the_advantages_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    """The loss is divided by the step's tokens, as in the authors' code, where the paper divides by its responses."""
    greedy = data.A
    made = run(ReMax, {"greedy": None, "greedy_rewards": None, "baseline": greedy})
    r, b = data.rewards.tolist(), greedy.tolist()
    assert_advantages(data, made.values["advantages"], of_tokens([x - y for x, y in zip(r, b, strict=True)]))
    assert_gradient(data, made, lambda new: remax.loss(new, r, b), scale=len(LENGTHS) / sum(LENGTHS))


def test_remax_s_nodes_subtract_the_full_step_kl_of_the_paper(run: Run, data: Batch) -> None:
    given = {"greedy": None, "greedy_rewards": None, "baseline": data.A}
    made = run(ReMax, given, kl_coef=BETA, kl_in_reward=True, kl_kind="k1", group_size=1)
    old, ref = numbers(data, data.log_old), numbers(data, data.log_ref)
    wanted = remax.advantages_with_kl(data.rewards.tolist(), data.A.tolist(), old, ref, BETA)
    assert_advantages(data, made.values["advantages"], wanted)


@pytest.mark.parametrize("weight", ["std", "filter", "none"])
def test_cpgd_s_nodes_give_the_advantages_and_gradient_of_the_paper(run: Run, data: Batch, weight: str) -> None:
    """Equation 2 averages over the tokens of a prompt's responses, then over prompts; the default, as the authors'
    code, over the tokens of the step, which weighs a prompt by its share of them.
    """
    groups = data.groups(data.rewards)
    weights = {
        "std": [1 / (std(group, ddof=1) + 1e-6) for group in groups],
        "filter": cpgd.clip_filter_like_weight(groups, 3.0),
        "none": [1.0] * len(groups),
    }[weight]
    A = of_responses(cpgd.advantages(groups, weights))
    made, old = run(CPGD, weight=weight, drift_coef=0.3, **TWICE), data.rows(data.log_old)
    assert_advantages(data, made.values["advantages"], of_tokens(A))

    def by_prompt(rows: list[Any]) -> list[list[Any]]:
        return [rows[i : i + GROUP] for i in range(0, len(rows), GROUP)]

    def theirs(new: list[Tensor]) -> Tensor:
        return cpgd.loss(by_prompt(new), by_prompt(old), by_prompt(A), 0.2, alpha=0.3, c=2.0)

    tokens = [sum(lengths) for lengths in by_prompt(list(LENGTHS))]
    shares = [n * len(tokens) / sum(tokens) for n in tokens for _ in range(GROUP)]
    wanted = gradient(theirs, data.rows(data.log_pi))
    assert_rows(data.rows(made.gradient), [[s * g for g in row] for s, row in zip(shares, wanted, strict=True)])


@pytest.mark.parametrize("reverse_kl", ["token", "sequence"])
def test_distillation_s_nodes_give_the_advantages_or_the_gradient_of_the_paper(
    run: Run, data: Batch, reverse_kl: str
) -> None:
    settings = {"teacher": CausalLM("teacher"), "group_size": 1, "reverse_kl": reverse_kl}
    given = {"teacher_logprobs": data.log_ref, "old_logprobs": data.log_pi}
    made = run(OnPolicyDistillation, given, **settings)
    log_q, log_p = data.rows(data.log_pi), data.rows(data.log_ref)
    if reverse_kl == "token":
        assert_advantages(data, made.values["advantages"], distillation.per_token_reverse_kl_advantages(log_q, log_p))
        return

    def theirs(new: list[Tensor]) -> Tensor:  # less MiniLLM's -1, whose expectation is 0
        return distillation.minillm_loss(new, log_p) - sum_of(map(sum_of, new)) / len(new)

    assert_gradient(data, made, theirs, scale=len(LENGTHS) / sum(LENGTHS))


def test_reinforce_plus_plus_s_nodes_give_the_advantages_and_loss_of_the_paper(run: Run, data: Batch) -> None:
    old, ref = numbers(data, data.log_old), numbers(data, data.log_ref)
    A = reinforce_plus_plus.advantages(data.rewards.tolist(), old, ref, BETA, ddof=1)
    made = run(REINFORCEPlusPlus, kl_coef=BETA, group_size=1, **TWICE)
    assert_advantages(data, made.values["advantages"], A)
    assert_loss(data, made, lambda new: ppo.clip_loss(new, data.rows(data.log_old), A, 0.2))


def test_reinforce_plus_plus_with_a_baseline_is_that_of_the_paper(run: Run, data: Batch) -> None:
    lengths = data.lengths.reshape(-1, GROUP).tolist()
    A = reinforce_plus_plus.advantages_with_baseline(data.groups(data.rewards), lengths, ddof=1)
    made = run(REINFORCEPlusPlusBaseline, kl_coef=BETA, **TWICE)
    assert_advantages(data, made.values["advantages"], A)
    old, ref = data.rows(data.log_old), data.rows(data.log_ref)

    def theirs(new: list[Tensor]) -> Tensor:
        return ppo.clip_loss(new, old, A, 0.2) + BETA * reinforce_plus_plus.k2_loss(new, ref)

    assert_loss(data, made, theirs)


def grpo(groups: list[list[float]]) -> list[float]:
    """GRPO's advantage, as its node makes it: (r - mean) / (std + 1e-6), 0 without spread."""
    return [
        (r - mean(group)) / (std(group, ddof=1) + 1e-6) if max(group) > min(group) else 0.0
        for group in groups
        for r in group
    ]


def test_sapo_s_nodes_give_the_loss_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    A = grpo(data.groups(data.rewards))
    made, old = run(SAPO, **TWICE), data.rows(data.log_old)
    assert_loss(data, made, lambda new: sapo.loss(new, old, A))


def test_gdpo_s_nodes_give_the_advantages_and_loss_of_the_paper(run: Run, data: Batch) -> None:
    parts = {"right": data.rewards, "format": data.A.round().abs()}
    groups = [data.groups(part) for part in parts.values()]
    for weights in (None, {"right": 1.0, "format": 0.25}):
        A = of_responses(gdpo.advantages(groups, list(weights.values()) if weights else None, eps_group=1e-6))
        made = run(GDPO, {"parts": parts}, part_weights=weights, **TWICE)
        assert_advantages(data, made.values["advantages"], of_tokens(A))
        old = data.rows(data.log_old)
        assert_loss(data, made, partial(ppo.clip_loss, log_old=old, A=of_tokens(A), epsilon=0.2))


def test_dppo_s_nodes_give_the_gradient_of_the_paper(run: Run, data: Batch) -> None:
    """The gradient is the paper's; the value is not, as the ratio has none in the loss. The engine's policy is mu."""
    made = run(DPPO, delta=0.005, **TWICE)
    A, mu = made.values["advantages"].tolist(), data.rows(data.log_mu)
    assert {0, 1} == {m for row in dppo.masks(data.rows(data.log_pi), mu, A, 0.005) for m in row}
    assert "old_logprobs" not in made.nodes
    assert_gradient(data, made, lambda new: dppo.loss(new, mu, A, 0.005))


def test_dppo_s_advantages_are_not_divided_by_a_deviation(run: Run, data: Batch) -> None:
    groups = data.groups(data.rewards)
    assert_advantages(
        data, run(DPPO).values["advantages"], of_tokens([r - mean(group) for group in groups for r in group])
    )


def test_maxrl_s_nodes_give_the_advantages_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    rewards = torch.tensor([0.0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
    made = run(MaxRL, {"rewards": rewards})
    A = of_responses([maxrl.advantages(group) for group in data.groups(rewards)])
    assert_advantages(data, made.values["advantages"], of_tokens(A))
    assert_gradient(data, made, lambda new: maxrl.loss(new, data.groups(rewards)))


def test_off_policy_sequence_masking_has_the_loss_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    """With the unbiased KL, which the mask leaves alone; pi_old is the engine's policy everywhere."""
    A = [r - mean(group) for group in data.groups(data.rewards) for r in group]
    mu, ref = data.rows(data.log_mu), data.rows(data.log_ref)
    made = run(OffPolicySequenceMasking, delta=0.1, kl_coef=BETA, **TWICE)
    assert_advantages(data, made.values["advantages"], of_tokens(A))
    assert 0 in deepseek_v32.sequence_masks(data.rows(data.log_pi), mu, A, 0.1)
    assert_loss(data, made, lambda new: deepseek_v32.loss(new, mu, mu, ref, A, 0.2, BETA, 0.1))


def test_reinforce_s_nodes_give_the_advantages_and_gradient_of_the_paper(run: Run, data: Batch) -> None:
    A = of_responses([reinforce.rloo_advantages(group) for group in data.groups(data.rewards)])
    made, mu = run(REINFORCE, **TWICE), data.rows(data.log_mu)
    assert_advantages(data, made.values["advantages"], of_tokens(A))
    assert "old_logprobs" not in made.nodes
    assert_gradient(data, made, lambda new: reinforce.loss(new, mu, A))
