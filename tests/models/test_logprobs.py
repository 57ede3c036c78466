from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.models.logprobs import Softmax, chunk_elements_in, chunk_elements_on, token_logprobs

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def in_full(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def test_temperature_divides_the_logits(known: dict[str, dict[str, float]]) -> None:
    # One hidden unit of 1, so that the weight's column is the logits.
    weight = torch.tensor(known["logprob_temperature"]["logits"])[:, None]
    temperature = known["logprob_temperature"]["temperature"]
    logprobs, _ = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), Softmax(temperature))
    assert logprobs.item() == pytest.approx(known["logprob_temperature"]["logprob_of_0"], abs=1e-6)


def test_entropy_is_in_nats(known: dict[str, dict[str, float]]) -> None:
    weight = torch.tensor(known["entropy"]["logits"])[:, None]
    _, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]))
    assert entropy.item() == pytest.approx(known["entropy"]["entropy"], abs=1e-6)


@pytest.mark.parametrize("chunk_elements", [1, VOCABULARY, 3 * VOCABULARY + 4, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(chunk_elements: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    found = token_logprobs(hidden, weight, targets, Softmax(temperature), chunk_elements)
    expected = in_full(hidden, weight, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    first, second = torch.randn(2, TOKENS, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((logprobs * first + entropy * second).sum(), (hidden, weight))
        for logprobs, entropy in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_elements", [1, 10**6])
def test_gradients_are_those_of_finite_differences(chunk_elements: int) -> None:
    hidden, weight, targets = inputs()
    softmax = Softmax(temperature=0.7)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, softmax, chunk_elements), (hidden, weight)
    )


@pytest.mark.parametrize("softmax", [Softmax(0.7, scale=3.0), Softmax(0.7, cap=0.8), Softmax(0.7, 0.5, 0.8)])
@pytest.mark.parametrize("chunk_elements", [3 * VOCABULARY, 10**6])
def test_logits_are_scaled_and_then_capped(softmax: Softmax, chunk_elements: int) -> None:
    hidden, weight, targets = inputs()
    found = token_logprobs(hidden, weight, targets, softmax, chunk_elements)
    logits = softmax.scale * (hidden @ weight.T)
    if softmax.cap is not None:
        logits = softmax.cap * torch.tanh(logits / softmax.cap)  # Gemma 2's report, 2408.00118, section 2
    distribution = torch.distributions.Categorical(logits=logits / 0.7)
    expected = distribution.log_prob(targets), distribution.entropy()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    first, second = torch.randn(2, TOKENS, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((logprobs * first + entropy * second).sum(), (hidden, weight))
        for logprobs, entropy in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wanted", [0, 1])
def test_either_result_can_be_trained_alone(wanted: int) -> None:
    hidden, weight, targets = inputs()
    found = torch.autograd.grad(token_logprobs(hidden, weight, targets)[wanted].sum(), (hidden, weight))
    expected = torch.autograd.grad(in_full(hidden, weight, targets, 1.0)[wanted].sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_bfloat16_states_give_float32_scores_of_the_same_logits() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_elements=VOCABULARY)
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T).float())
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, distribution.log_prob(targets), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=0, atol=1e-6)


def test_the_gradient_of_a_bfloat16_weight_is_summed_wider_than_bfloat16() -> None:
    # 512 equal tokens, each alone in its chunk, over two words of logit 0: the first word's weight gets
    # 512 * (1 - 1/2) = 256. A sum kept in bfloat16 stops at 128, where adding 1/2 no longer changes it.
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_elements=2)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [256.0, -256.0]


def test_no_tokens_give_zero_gradients_and_not_none() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


class _Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_all_logits_are_never_held_together() -> None:
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(100, 2, requires_grad=True)
    with _Largest() as largest:
        logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), chunk_elements=400)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.elements == 400  # four tokens' logits, where all 64 tokens' would be 6,400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_head_computes_in_float32_what_it_is_given_in_less(dtype: torch.dtype) -> None:
    """Against float64 of the same rounded numbers; products in their own dtype are 100 times as far off."""
    hidden, weight, targets = inputs(dtype)
    wide, narrow = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = in_full(wide, narrow, targets, 1.0)
    found = token_logprobs(hidden, weight, targets, Softmax(wide=True), 3 * VOCABULARY)
    plain = token_logprobs(hidden, weight, targets, chunk_elements=3 * VOCABULARY)
    for ours, theirs, without in zip(found, expected, plain, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6)
        assert float((without.double() - theirs).detach().abs().max()) > 2e-4
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, weight))
    exact = torch.autograd.grad(expected[0].sum() + expected[1].sum(), (wide, narrow))
    for ours, theirs in zip(gradients, exact, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_a_gpu_takes_larger_chunks_of_logits_the_more_memory_it_has() -> None:
    sizes = {gib: chunk_elements_in(gib * 2**30) for gib in (16, 24, 40, 80, 192)}
    assert sizes == {16: 2**26, 24: 2**26, 40: 2**27, 80: 2**28, 192: 2**28}  # 80 GiB / 24 / 12 bytes are 2**28.2
    assert chunk_elements_on(torch.device("cpu")) == 2**26


def test_logits_that_nothing_scales_are_passed_over_less_often() -> None:
    counted = []
    for softmax in (Softmax(), Softmax(0.5), Softmax(0.5, scale=2.0)):
        hidden, weight, targets = inputs()
        with _Counted() as passes:
            token_logprobs(hidden, weight, targets, softmax)[0].sum().backward()
        counted.append(passes.in_place)
    plain, warm, scaled = counted
    assert (warm - plain, scaled - warm) == (3, 3)  # the logits, forward and backward, and their gradient


class _Counted(TorchDispatchMode):
    """Counts multiplications and divisions in place by a number."""

    in_place = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        self.in_place += name in ("div_", "mul_") and not isinstance(args[1], Tensor)
        return function(*args, **(kwargs or {}))
