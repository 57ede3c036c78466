from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.functional import value_loss


def test_the_larger_of_both_errors_counts(known: dict[str, Any]) -> None:
    answer = known["value_clip"]
    value, old, target = (torch.tensor([[answer[name]]]) for name in ("value", "old_value", "return"))
    assert_close(value_loss(value, old, target, answer["clip_range"]).item(), answer["loss"])


def test_a_value_that_moved_far_towards_its_target_has_no_gradient() -> None:
    values = torch.tensor([[0.9]], requires_grad=True)  # from 0 towards 1, by more than 0.2
    loss = value_loss(values, torch.tensor([[0.0]]), torch.tensor([[1.0]]), 0.2)
    loss.sum().backward()
    assert_close(loss.item(), 0.32)  # (0.2 - 1)^2 / 2
    assert values.grad is not None
    assert values.grad.item() == 0.0


def test_without_a_range_it_is_half_the_squared_error() -> None:
    assert_close(value_loss(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0])), torch.tensor([2.0]))


def test_gradients_agree_with_finite_differences_and_reach_the_values_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).unbind()

    def loss(x: Tensor) -> Tensor:
        return value_loss(x, old, returns, 0.5)

    assert torch.autograd.gradcheck(loss, values.clone().requires_grad_())
    assert not value_loss(values, old.requires_grad_(), returns.requires_grad_(), 0.5).requires_grad
