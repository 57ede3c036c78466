"""The references of whole steps, `surrogates_float64` and `advantages_float64`, equal the papers'."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from torch import Tensor

from tests.reference import advantages_float64 as worth
from tests.reference import surrogates_float64 as surrogates
from tests.reference.paper_batches import GROUP, SEEDS, Batch, assert_rows, batch
from tests.reference.papers import cpgd, deepseek_v32, gmpo, gpg, gspo, opo, ppo, reinforce_plus_plus
from tests.reference.papers.ragged import gradient, ragged, response_mean, token_mean


@pytest.fixture(params=SEEDS)
def data(request: pytest.FixtureRequest) -> Batch:
    return batch(request.param)


def numbers(data: Batch, x: Tensor) -> list[list[float]]:
    return [row.tolist() for row in data.rows(x)]


def assert_same_gradient(
    data: Batch,
    reference: Callable[[list[Tensor], int], list[Tensor]],
    paper: Callable[[list[Tensor]], Tensor],
    mean: Callable[[list[list[Tensor]]], Tensor] = token_mean,
) -> None:
    """`reference` is of the tokens of response i."""
    log_pi = data.rows(data.log_pi)
    found = gradient(lambda rows: mean([reference(list(row.unbind()), i) for i, row in enumerate(rows)]), log_pi)
    assert_rows(ragged(found), gradient(paper, log_pi))


def test_ppo_s_surrogate_has_the_gradient_of_the_paper(data: Batch) -> None:
    old, A = numbers(data, data.log_old), numbers(data, data.A_t)
    assert_same_gradient(
        data,
        lambda new, i: surrogates.ppo(new, old[i], A[i], 0.2, 0.2),
        lambda rows: ppo.clip_loss(rows, ragged(old), A, 0.2),
    )


def test_gspo_s_surrogate_has_the_gradient_of_the_paper(data: Batch) -> None:
    old, A = numbers(data, data.log_old), data.A.tolist()
    assert_same_gradient(
        data,
        lambda new, i: surrogates.gspo(new, old[i], A[i], 0.3, 0.5),
        lambda rows: gspo.loss(rows, ragged(old), A, 0.3, 0.5),
        response_mean,
    )


def test_gmpo_s_surrogate_has_the_gradient_of_the_paper(data: Batch) -> None:
    old, A = numbers(data, data.log_old), data.A.tolist()
    assert_same_gradient(
        data,
        lambda new, i: surrogates.gmpo(new, old[i], A[i], 0.4, 0.4),
        lambda rows: gmpo.loss(rows, ragged(old), A),
        response_mean,
    )


def test_cpgd_s_surrogate_has_the_gradient_of_the_paper(data: Batch) -> None:
    old, A = numbers(data, data.log_old), data.A.tolist()
    assert_same_gradient(
        data,
        lambda new, i: surrogates.cpgd(new, old[i], [A[i]] * len(new), 0.2, 0.2, 0.3, 2.0),
        lambda rows: cpgd.loss([rows], [ragged(old)], [A], 0.2, 0.3, 2.0),
    )


def test_gpg_s_surrogate_has_the_gradient_of_the_paper(data: Batch) -> None:
    A = data.A.tolist()
    assert_same_gradient(
        data, lambda new, i: surrogates.policy_gradient(new, [A[i]] * len(new)), lambda rows: gpg.loss(rows, A)
    )


def test_the_k3_ratio_divergence_has_the_gradient_of_deepseek_v32_s_paper(data: Batch) -> None:
    old, ref = numbers(data, data.log_old), numbers(data, data.log_ref)

    def reference(new: list[Tensor], i: int) -> list[Tensor]:
        return [surrogates.divergence(n, r, "k3-ratio", o) for n, r, o in zip(new, ref[i], old[i], strict=True)]

    def paper(rows: list[Tensor]) -> Tensor:
        each = zip(rows, data.rows(data.log_old), data.rows(data.log_ref), strict=True)
        return token_mean([[deepseek_v32.unbiased_kl(*token) for token in zip(*row, strict=True)] for row in each])

    assert_same_gradient(data, reference, paper)


def test_opo_gpg_and_cpgd_advantages_are_those_of_the_papers(data: Batch) -> None:
    rewards, groups = data.rewards.tolist(), data.group.tolist()
    of_groups, lengths = data.groups(data.rewards), data.lengths.reshape(-1, GROUP).tolist()
    wanted = [opo.advantages(r, n) for r, n in zip(of_groups, lengths, strict=True)]
    assert worth.opo(rewards, groups, data.lengths.tolist()) == pytest.approx(list(chain(*wanted)), rel=1e-12)
    assert worth.gpg(rewards, groups) == pytest.approx(list(chain(*gpg.advantages(of_groups))), rel=1e-12)
    weights = cpgd.clip_filter_like_weight(of_groups, 1.2)
    filtered = chain(*cpgd.advantages(of_groups, weights))
    assert worth.cpgd_filtered(rewards, groups, 1.2) == pytest.approx(list(filtered), rel=1e-12)


def test_gae_and_whitening_are_those_of_the_papers(data: Batch) -> None:
    rewards, values, after = numbers(data, data.A_t), numbers(data, data.log_ref), data.A.tolist()
    given = list(zip(rewards, values, after, strict=True))
    A = [ppo.gae(r, V, 0.97, 0.9, end) for r, V, end in given]
    assert_rows(ragged([worth.gae(r, V, 0.97, 0.9, end)[0] for r, V, end in given]), A)
    assert_rows(ragged(worth.whitened(A)), reinforce_plus_plus.normalised(A, ddof=1))
