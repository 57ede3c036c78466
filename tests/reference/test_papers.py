"""Pure functions of rlflow equal the references written from the papers, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlflow import functional
from rlflow.functional import Aggregation, aggregate
from tests.reference.paper_batches import GROUP, SEEDS, Batch, assert_rows, assert_tight, batch
from tests.reference.papers import deepseek_v32, dppo, gmpo, gspo, opo, ppo, reinforce_plus_plus, sapo
from tests.reference.papers.ragged import gradient, token_mean

Ours = Callable[[Tensor], Tensor]
Theirs = Callable[[list[Tensor]], Tensor]


@pytest.fixture(params=SEEDS)
def data(request: pytest.FixtureRequest) -> Batch:
    return batch(request.param)


def assert_same_loss(data: Batch, ours: Ours, theirs: Theirs, mode: Aggregation) -> None:
    """Value and gradient to log pi; `ours` is per token or per sample, before it is aggregated."""
    leaf = data.log_pi.clone().requires_grad_()
    loss = aggregate(ours(leaf), data.mask, mode)
    loss.backward()
    log_pi = data.rows(data.log_pi)
    assert_tight(loss.detach(), theirs(log_pi).detach())
    assert leaf.grad is not None
    assert_rows(data.rows(leaf.grad), gradient(theirs, log_pi))
    assert not leaf.grad[~data.mask].any()


def test_ppo_loss_is_that_of_its_paper(data: Batch) -> None:
    old, A = data.rows(data.log_old), [row.tolist() for row in data.rows(data.A_t)]
    assert_same_loss(
        data,
        lambda new: functional.ppo_clip_loss(new, data.log_old, data.A_t, 0.2, 0.2),
        lambda new: ppo.clip_loss(new, old, A, 0.2),
        "token-mean",
    )


def test_twice_the_critic_s_loss_is_the_value_loss_of_ppo_s_paper(data: Batch) -> None:
    targets = [row.tolist() for row in data.rows(data.A_t)]
    assert_same_loss(
        data,
        lambda new: 2 * functional.value_loss(new, data.log_old, data.A_t, None),
        lambda new: ppo.value_loss(new, targets),
        "token-mean",
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)])
def test_gae_is_that_of_its_paper_in_both_forms(data: Batch, gamma: float, lam: float) -> None:
    advantages, returns = functional.gae(data.A_t, data.log_ref, data.mask, gamma, lam, data.A)
    for i, (r, V) in enumerate(zip(data.rows(data.A_t), data.rows(data.log_ref), strict=True)):
        wanted = torch.tensor(ppo.gae(r.tolist(), V.tolist(), gamma, lam, data.A[i].item()), dtype=torch.float64)
        assert_tight(advantages[i, : len(r)], wanted)
        assert_tight(returns[i, : len(r)], wanted + V)
        also = ppo.gae_as_average(r.tolist(), V.tolist(), gamma, lam, data.A[i].item())
        assert_tight(torch.tensor(also, dtype=torch.float64), wanted)


def test_token_rewards_with_kl_are_those_of_ppo_s_paper(data: Batch) -> None:
    found = functional.last_token_rewards(data.rewards, data.mask)
    found = found - 0.1 * functional.kl_estimate(data.log_old, data.log_ref, "k1")
    old, ref = ([row.tolist() for row in data.rows(x)] for x in (data.log_old, data.log_ref))
    assert_rows(data.rows(found), ppo.rewards_with_kl(data.rewards.tolist(), old, ref, 0.1))


def test_gmpo_loss_is_that_of_its_paper(data: Batch) -> None:
    old = data.rows(data.log_old)
    assert_same_loss(
        data,
        lambda new: functional.gmpo_loss(new, data.log_old, data.A, data.mask, 0.4, 0.4),
        lambda new: gmpo.loss(new, old, data.A.tolist(), 0.4, 0.4),
        "sequence-mean-token-mean",
    )


@pytest.mark.parametrize("clips", [(3e-4, 4e-4), (0.3, 0.5)])
def test_gspo_loss_is_that_of_its_paper(data: Batch, clips: tuple[float, float]) -> None:
    old = data.rows(data.log_old)
    assert_same_loss(
        data,
        lambda new: functional.gspo_loss(new, data.log_old, data.A, data.mask, *clips),
        lambda new: gspo.loss(new, old, data.A.tolist(), *clips),
        "sequence-mean-token-mean",
    )


@pytest.mark.parametrize("clips", [(3e-4, 4e-4), (0.3, 0.5)])
def test_gspo_token_loss_is_that_of_its_paper(data: Batch, clips: tuple[float, float]) -> None:
    old, A = data.rows(data.log_old), [row.tolist() for row in data.rows(data.A_t)]
    assert_same_loss(
        data,
        lambda new: functional.gspo_loss(new, data.log_old, data.A_t, data.mask, *clips),
        lambda new: gspo.token_loss(new, old, A, *clips),
        "sequence-mean-token-mean",
    )


def test_opo_advantages_are_those_of_its_paper(data: Batch) -> None:
    found = functional.opo_advantages(data.rewards, data.lengths, data.group).reshape(-1, GROUP)
    lengths = data.lengths.reshape(-1, GROUP).tolist()
    wanted = [opo.advantages(r, n) for r, n in zip(data.groups(data.rewards), lengths, strict=True)]
    assert_rows(list(found), wanted)


def test_the_k2_estimate_is_the_kl_loss_of_reinforce_plus_plus_s_paper(data: Batch) -> None:
    ref = data.rows(data.log_ref)
    assert_same_loss(
        data,
        lambda new: functional.kl_estimate(new, data.log_ref, "k2"),
        lambda new: reinforce_plus_plus.k2_loss(new, ref),
        "token-mean",
    )


def test_the_k3_ratio_estimate_is_the_unbiased_kl_of_deepseek_v32_s_paper(data: Batch) -> None:
    old, ref = data.rows(data.log_old), data.rows(data.log_ref)

    def theirs(new: list[Tensor]) -> Tensor:
        return token_mean(
            [
                [deepseek_v32.unbiased_kl(new[i][t], old[i][t], ref[i][t]) for t in range(len(new[i]))]
                for i in range(len(new))
            ]
        )

    def ours(new: Tensor) -> Tensor:
        return functional.kl_estimate(new, data.log_ref, "k3-ratio", data.log_old)

    assert_same_loss(data, ours, theirs, "token-mean")


def test_sapo_loss_is_that_of_its_paper(data: Batch) -> None:
    old = data.rows(data.log_old)
    assert_same_loss(
        data,
        lambda new: functional.sapo_loss(new, data.log_old, data.A, 1.0, 1.05),
        lambda new: sapo.loss(new, old, data.A.tolist(), 1.0, 1.05),
        "sequence-mean-token-mean",
    )


@pytest.mark.parametrize("delta", [0.15, 0.05])
def test_dppo_masks_are_those_of_its_paper(data: Batch, delta: float) -> None:
    found = functional.dppo_tv_mask(data.log_pi, data.log_old, data.A, delta)
    wanted = dppo.masks(data.rows(data.log_pi), data.rows(data.log_old), data.A.tolist(), delta)
    assert {0, 1} == {m for row in wanted for m in row}
    assert_rows(data.rows(found), wanted)


@pytest.mark.parametrize("delta", [0.0, -0.3])
def test_off_policy_sequence_masks_are_those_of_deepseek_v32_s_paper(data: Batch, delta: float) -> None:
    found = functional.off_policy_sequence_mask(data.log_pi, data.log_old, data.A, data.mask, delta)
    wanted = deepseek_v32.sequence_masks(data.rows(data.log_pi), data.rows(data.log_old), data.A.tolist(), delta)
    assert {0, 1} == set(wanted)
    assert_rows(data.rows(found), [[m] * len(row) for m, row in zip(wanted, data.rows(data.log_pi), strict=True)])
