from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from rlflow.functional import bradley_terry_loss, dpo_loss, kto_loss, preference_accuracy, simpo_loss


def pair(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor([number], dtype=torch.float64, requires_grad=True) for number in numbers]


def test_dpo_takes_the_margin_over_the_reference() -> None:
    # margin (-1 - -2) - (-3 - -2.5) = 1.5; -log sigmoid(0.4 * 1.5) = log(1 + e^-0.6)
    assert_close(dpo_loss(*pair(-1.0, -3.0, -2.0, -2.5), beta=0.4).item(), math.log1p(math.exp(-0.6)))


def test_dpo_of_a_policy_that_equals_its_reference_is_log_2_with_gradient_half_beta() -> None:
    chosen, rejected, ref_chosen, ref_rejected = pair(-1.0, -3.0, -1.0, -3.0)
    loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)
    loss.sum().backward()
    assert_close(loss.item(), math.log(2.0))
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert_close((chosen.grad.item(), rejected.grad.item()), (-0.05, 0.05))
    assert ref_chosen.grad is None
    assert ref_rejected.grad is None


def test_bradley_terry_prefers_the_higher_score() -> None:
    assert_close(bradley_terry_loss(*pair(2.0, 1.0)).item(), math.log1p(math.exp(-1.0)))
    assert_close(bradley_terry_loss(*pair(1.0, 2.0)).item(), math.log1p(math.exp(1.0)))


def test_hopeless_pairs_stay_finite() -> None:
    assert_close(bradley_terry_loss(torch.tensor([-500.0]), torch.tensor([500.0])), torch.tensor([1000.0]))
    assert_close(dpo_loss(*pair(-5000.0, 0.0, 0.0, 0.0), beta=1.0).item(), 5000.0)


def test_gradients_agree_with_finite_differences() -> None:
    chosen, rejected, ref_chosen, ref_rejected = pair(-1.2, -0.7, -1.0, -3.0)
    assert torch.autograd.gradcheck(lambda c, r: dpo_loss(c, r, ref_chosen, ref_rejected, 0.3), (chosen, rejected))
    assert torch.autograd.gradcheck(bradley_terry_loss, (chosen, rejected))


def test_a_pair_in_which_neither_is_ahead_counts_half() -> None:
    assert preference_accuracy(torch.tensor([2.0, -0.1, 0.0])).tolist() == [1.0, 0.0, 0.5]


def test_simpo_compares_means_less_a_margin() -> None:
    # 2 * (-0.5 - -0.8) - 0.25 = 0.35; -log sigmoid(0.35) = log(1 + e^-0.35)
    assert_close(simpo_loss(*pair(-0.5, -0.8), beta=2.0, gamma=0.25).item(), math.log1p(math.exp(-0.35)))


def test_kto_weighs_good_and_bad_against_the_divergence() -> None:
    ratios, good = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([True, False])
    found = kto_loss(
        ratios, torch.tensor(0.5, dtype=torch.float64), good, 0.4, desirable_weight=3.0, undesirable_weight=2.0
    )
    # 1 - sigmoid(0.4 * (1 - 0.5)) = 1 / (1 + e^0.2), three times; 1 - sigmoid(-0.2) = 1 / (1 + e^-0.2), twice
    assert_close(found.tolist(), [3.0 / (1.0 + math.exp(0.2)), 2.0 / (1.0 + math.exp(-0.2))])


@pytest.mark.slow
def test_simpo_is_that_of_trl() -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    theirs = SimpleNamespace(
        alpha=0.0,
        beta=2.5,
        loss_type="simpo",
        simpo_gamma=1.4,
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    chosen, rejected = torch.tensor([[-0.3, -1.2, -0.9], [-0.5, -0.4, -2.0]], dtype=torch.float64)
    expected, *_ = CPOTrainer.cpo_loss(theirs, chosen, rejected)
    assert_close(simpo_loss(chosen, rejected, beta=2.5, gamma=1.4), expected)
