"""Every pure function of rlflow against its reference, values and gradients, on ragged responses in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow import functional
from tests.reference import advantages_float64 as worth
from tests.reference import surrogates_float64 as surrogates

LENGTHS = [5, 1, 3, 4, 2, 5]
GROUPS = [4, 9, 4, 9, 4, 9]
WHOLE = [0.7, -1.3, 0.4, 0.0, 1.1, -0.2]  # an advantage or a reward of each response
DRAW = torch.Generator().manual_seed(0)


def tokens(low: float, high: float) -> Tensor:
    """`[B, T]`, uniform; what stands on padding is of no use."""
    drawn = low + (high - low) * torch.rand(len(LENGTHS), max(LENGTHS), generator=DRAW, dtype=torch.float64)
    return drawn.masked_fill(~MASK, 7.0)


MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
OLD = tokens(-3, -1)
NEW = (OLD + tokens(-0.8, 0.8)).masked_fill(~MASK, 0.0)
REWARDS, VALUES = tokens(-1, 1), tokens(-1, 1)
RATES = 0.2, 0.28


def rows(x: Tensor) -> list[list[float]]:
    """The tokens of each response."""
    return [row[:length].tolist() for row, length in zip(x, LENGTHS, strict=True)]


def assert_equal_rows(found: Tensor, expected: list[list[float]]) -> None:
    for row, numbers, length in zip(found, expected, LENGTHS, strict=True):
        assert_close(row[:length], torch.tensor(numbers, dtype=torch.float64), rtol=1e-12, atol=1e-13)


Surrogate = Callable[[list[Tensor], list[float], float], list[Tensor]]

SURROGATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Surrogate]] = {
    "ppo": (
        lambda new, old, A: functional.ppo_clip_loss(new, old, A, *RATES),
        lambda new, old, A: surrogates.ppo(new, old, [A] * len(new), *RATES),
    ),
    "dual clip": (
        lambda new, old, A: functional.ppo_clip_loss(new, old, A, *RATES, dual_clip=1.5),
        lambda new, old, A: surrogates.ppo(new, old, [A] * len(new), *RATES, 1.5),
    ),
    "cispo": (
        lambda new, old, A: functional.cispo_loss(new, old, A, 0.28),
        lambda new, old, A: surrogates.cispo(new, old, [A] * len(new), 0.28),
    ),
    "gspo": (
        lambda new, old, A: functional.gspo_loss(new, old, A, MASK, *RATES),
        lambda new, old, A: surrogates.gspo(new, old, A, *RATES),
    ),
    "gmpo": (
        lambda new, old, A: functional.gmpo_loss(new, old, A, MASK, *RATES),
        lambda new, old, A: surrogates.gmpo(new, old, A, *RATES)[:1],
    ),
}


@pytest.mark.parametrize(("ours", "reference"), SURROGATES.values(), ids=SURROGATES.keys())
def test_surrogate_losses_and_their_gradients_are_those_of_the_reference(
    ours: Callable[[Tensor, Tensor, Tensor], Tensor], reference: Surrogate
) -> None:
    new, same = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    losses = ours(new, OLD, torch.tensor(WHOLE, dtype=torch.float64))
    losses = losses.where(MASK, 0.0) if losses.dim() == 2 else losses
    expected = [reference(list(row[:n]), o, a) for row, n, o, a in zip(same, LENGTHS, rows(OLD), WHOLE, strict=True)]
    for row, numbers in zip(losses, expected, strict=True):
        assert_close(row.reshape(-1)[: len(numbers)], torch.stack(numbers), rtol=1e-12, atol=1e-13)
    losses.sum().backward()
    torch.stack([loss for losses in expected for loss in losses]).sum().backward()
    assert_close(new.grad, same.grad, rtol=1e-12, atol=1e-13)


def test_cpgd_s_loss_and_drift_have_the_gradient_of_the_reference() -> None:
    new, same = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    loss = functional.cpgd_loss(new, OLD, torch.tensor(WHOLE, dtype=torch.float64), *RATES)
    (loss + 0.3 * functional.cpgd_drift(new, OLD, 0.1)).where(MASK, 0.0).sum().backward()
    expected = [
        surrogates.cpgd(list(row[:n]), o, [a] * n, *RATES, drift=0.3, c=0.1)
        for row, n, o, a in zip(same, LENGTHS, rows(OLD), WHOLE, strict=True)
    ]
    torch.stack([loss for losses in expected for loss in losses]).sum().backward()
    assert_close(new.grad, same.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_importance_weights_are_those_of_the_reference(level: Any, mode: Any) -> None:
    found = functional.importance_weights(NEW, OLD, MASK, functional.Importance(level, mode, 0.8, 1.3))
    pairs = zip(rows(NEW), rows(OLD), strict=True)
    assert_equal_rows(found, [surrogates.importance(n, o, level, mode, 0.8, 1.3) for n, o in pairs])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k3+", "k3-ratio"])
def test_divergences_and_their_gradients_are_those_of_the_reference(kind: Any) -> None:
    new, same = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    found = functional.kl_estimate(new, OLD, kind)[MASK]
    expected = torch.stack(
        [surrogates.divergence(n, o.item(), kind) for n, o in zip(same[MASK], OLD[MASK], strict=True)]
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-13)
    found.sum().backward()
    expected.sum().backward()
    assert_close(new.grad, same.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_critic_s_loss_and_its_gradient_are_those_of_the_reference(clip: float | None) -> None:
    new, same = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    found = functional.value_loss(new, OLD, REWARDS, clip)[MASK]
    expected = torch.stack(surrogates.value(list(same[MASK]), OLD[MASK].tolist(), REWARDS[MASK].tolist(), clip))
    assert_close(found, expected, rtol=1e-12, atol=1e-13)
    found.sum().backward()
    expected.sum().backward()
    assert_close(new.grad, same.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("after", [None, WHOLE])
def test_gae_is_that_of_the_reference(after: list[float] | None) -> None:
    bootstrap = None if after is None else torch.tensor(after, dtype=torch.float64)
    advantages, returns = functional.gae(REWARDS, VALUES, MASK, 0.9, 0.8, bootstrap)
    ends = after or [0.0] * len(LENGTHS)
    expected = [worth.gae(r, v, 0.9, 0.8, e) for r, v, e in zip(rows(REWARDS), rows(VALUES), ends, strict=True)]
    assert_equal_rows(advantages, [advantage for advantage, _ in expected])
    assert_equal_rows(returns, [total for _, total in expected])


def test_discounted_returns_are_those_of_the_reference() -> None:
    found = functional.reinforce_returns(REWARDS, MASK, 0.9)
    assert_equal_rows(found, [worth.discounted(r, 0.9) for r in rows(REWARDS)])


def test_whitening_is_that_of_the_reference() -> None:
    moments = functional.merge_moments(functional.row_moments(REWARDS, MASK))
    assert_equal_rows(functional.standardize(REWARDS, MASK, moments), worth.whitened(rows(REWARDS)))


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (lambda r, g: functional.group_normalized_advantages(r, g, eps=1e-6), worth.grpo(WHOLE, GROUPS, 1e-6)),
        (lambda r, g: functional.group_normalized_advantages(r, g, normalize_std=False), worth.dr_grpo(WHOLE, GROUPS)),
        (functional.rloo_advantages, worth.rloo(WHOLE, GROUPS)),
        (lambda r, g: functional.opo_advantages(r, torch.tensor(LENGTHS), g), worth.opo(WHOLE, GROUPS, LENGTHS)),
    ],
    ids=["grpo", "dr. grpo", "rloo", "opo"],
)
def test_advantages_of_groups_are_those_of_the_reference(
    ours: Callable[[Tensor, Tensor], Tensor], expected: list[float]
) -> None:
    found = ours(torch.tensor(WHOLE, dtype=torch.float64), torch.tensor(GROUPS))
    assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


def test_overlong_penalties_are_those_of_the_reference() -> None:
    found = functional.overlong_penalty(torch.arange(1, 15, dtype=torch.float64), 12, 5)
    assert found.tolist() == [worth.overlong(length, 12, 5) for length in range(1, 15)]
