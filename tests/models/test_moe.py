"""Settings of experts, their balance, and routing: numbers by hand and transformers' own functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlflow.errors import UserError
from rlflow.models.moe import MoE, Routing, load_balancing_loss


def test_the_loss_of_a_sequence_is_that_of_its_fractions_and_mean_probabilities() -> None:
    # One layer of two experts; each token takes one. The first sequence of two tokens takes expert 0 twice
    # with probabilities 3/4 and 1/2: 2 (1 * 5/8 + 0 * 3/8) = 5/4. The second takes both, and has 3/4 and 1/4: 1.
    logits = torch.tensor([[3.0, 1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 3.0]]).log()[:, None]
    used = torch.tensor([0, 0, 0, 1])[:, None, None]
    torch.testing.assert_close(load_balancing_loss(logits, used, torch.tensor([2, 2])), torch.tensor([1.25, 1.0]))


def test_the_loss_of_one_layer_is_transformers_s_divided_by_experts_per_token() -> None:
    logits = torch.randn(13, 1, 8, generator=torch.Generator().manual_seed(0))
    used = logits.topk(3).indices
    expected = load_balancing_loss_func((logits[:, 0],), num_experts=8, top_k=3) / 3
    torch.testing.assert_close(load_balancing_loss(logits, used, torch.tensor([13]))[0], expected)


def test_the_loss_is_the_mean_over_layers_and_of_each_sequence_alone() -> None:
    logits = torch.randn(9, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    used = logits.topk(2).indices
    together = load_balancing_loss(logits, used, torch.tensor([4, 5]))
    parts = (slice(0, 4), slice(4, 9))
    for found, part in zip(together, parts, strict=True):
        of_layers = [
            load_balancing_loss(logits[part, [layer]], used[part, [layer]], torch.tensor([part.stop - part.start]))[0]
            for layer in range(2)
        ]
        torch.testing.assert_close(found, sum(of_layers) / 2, rtol=0, atol=1e-15)


def test_the_same_experts_in_another_order_are_not_another_routing() -> None:
    routing = Routing(torch.tensor([[[1, 0]], [[2, 1]], [[3, 0]]]))
    routing._own[0] = torch.tensor([[0, 1], [1, 2], [0, 2]])
    assert routing.otherwise()[:, 0].tolist() == [False, False, True]


SETTINGS: list[tuple[Callable[[], object], str]] = [
    (lambda: MoE(router_aux_loss_coef=-0.1), r"^`moe\.router_aux_loss_coef` is -0\.1; give 0 or more"),
    (lambda: MoE(router_aux_loss_coef=float("nan")), r"^`moe\.router_aux_loss_coef` is nan; give 0 or more"),
    (lambda: MoE(freeze_router=True, router_aux_loss_coef=0.1), r"and `moe\.freeze_router` freezes the routers"),
]


@pytest.mark.parametrize(("make", "told"), SETTINGS)
def test_settings_that_cannot_be_are_refused(make: Callable[[], Tensor], told: str) -> None:
    with pytest.raises(UserError, match=told):
        make()
