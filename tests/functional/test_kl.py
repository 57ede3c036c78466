from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlflow.errors import UserError
from rlflow.functional import KLEstimator, kl_estimate


def expected_gradient(kind: KLEstimator) -> float:
    """Gradient to the first policy logit of the estimator's expectation over both actions, sampling held fixed."""
    logits = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    ref_logprobs = torch.tensor([-0.5, 0.0], dtype=torch.float64).log_softmax(0)
    (logprobs.exp().detach() * kl_estimate(logprobs, ref_logprobs, kind)).sum().backward()
    assert logits.grad is not None
    return logits.grad[0].item()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_have_the_known_values(known: dict[str, Any], kind: KLEstimator) -> None:
    logprob, ref = torch.tensor([[known["kl"]["logprob"]]]), torch.tensor([[known["kl"]["ref_logprob"]]])
    assert_close(kl_estimate(logprob, ref, kind).item(), known["kl"][kind], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimators_as_losses_have_the_known_gradients(known: dict[str, Any], kind: KLEstimator) -> None:
    assert_close(expected_gradient(kind), known["kl_gradient"][f"{kind}_loss"], rtol=0, atol=1e-7)


def test_abs_is_the_size_of_k1() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -0.5])
    assert_close(kl_estimate(logprobs, ref, "abs"), torch.tensor([1.0, 1.5]))


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(known: dict[str, Any]) -> None:
    logprobs, ref = torch.tensor([-1.0, -0.3]), torch.tensor([-2.0, -0.2])
    assert kl_estimate(logprobs, ref, "k3+").tolist() == kl_estimate(logprobs, ref, "k3").tolist()
    assert_close(expected_gradient("k3+"), known["kl_gradient"]["true_gradient"], rtol=0, atol=1e-7)


def test_k3_ratio_is_the_default_and_on_policy_has_k3_s_value_and_k2_s_gradient(
    known: dict[str, Any],
) -> None:
    logprobs, ref = torch.tensor([-1.0, -0.3]), torch.tensor([-2.0, -0.2])
    assert kl_estimate(logprobs, ref).tolist() == kl_estimate(logprobs, ref, "k3").tolist()
    assert_close(expected_gradient("k3-ratio"), known["kl_gradient"]["true_gradient"], rtol=0, atol=1e-7)


def test_k3_ratio_alone_has_the_gradient_of_kl_for_off_policy_tokens() -> None:
    old, ref = (torch.tensor([x, 0.0], dtype=torch.float64).log_softmax(0) for x in (0.2, -0.5))

    def gradient(of: str) -> float:
        logits = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
        pi = logits.log_softmax(0)
        if of == "KL":
            (pi.exp() * (pi - ref)).sum().backward()
        else:
            (old.exp() * kl_estimate(pi, ref, of, old)).sum().backward()  # type: ignore[arg-type]
        assert logits.grad is not None
        return logits.grad[0].item()

    assert_close(gradient("k3-ratio"), gradient("KL"), rtol=0, atol=1e-12)
    assert all(abs(gradient(kind) - gradient("KL")) > 0.02 for kind in ("k1", "k2", "k3", "k3+"))


@pytest.mark.parametrize("kind", ["k3", "k3+", "k3-ratio"])
@pytest.mark.parametrize("apart", [-89.5, 89.5])
def test_policies_far_apart_leave_value_and_gradient_finite(kind: KLEstimator, apart: float) -> None:
    logprobs = torch.tensor([apart], requires_grad=True)
    value = kl_estimate(logprobs, torch.zeros(1), kind, torch.zeros(1))
    value.sum().backward()
    assert logprobs.grad is not None
    assert value.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    d = 2.0**-12  # exact in float32; k3 is d^2 / 2 - d^3 / 6 to 1e-12 of itself
    value = kl_estimate(torch.tensor(d), torch.tensor(0.0), "k3").item()
    assert_close(value, d**2 / 2 - d**3 / 6, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", get_args(KLEstimator))
def test_equal_policies_have_no_divergence_and_the_reference_no_gradient(kind: KLEstimator) -> None:
    logprobs = torch.tensor([-1.0, -7.3], requires_grad=True)
    ref = logprobs.detach().clone().requires_grad_()
    divergence = kl_estimate(logprobs, ref, kind)
    divergence.sum().backward()
    assert divergence.tolist() == [0.0, 0.0]
    assert ref.grad is None


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradients_agree_with_finite_differences(kind: KLEstimator) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = (-torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)).unbind()

    def estimate(x: Tensor) -> Tensor:
        return kl_estimate(x, ref, kind)

    assert torch.autograd.gradcheck(estimate, logprobs.clone().requires_grad_())


def test_an_estimator_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"'k4' does not exist; choose one of k1, k2, k3, abs, k3\+"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
