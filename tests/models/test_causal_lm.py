from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import take
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import Batch
from tests.models.conftest import one_by_one, random_rows

Build = Callable[..., CausalLM]
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("token_budget", [1, 40, 4096])
def test_scores_are_those_of_each_row_alone(
    tiny: Path, handle: Build, rows: Batch, dtype: torch.dtype, packing: bool, token_budget: int
) -> None:
    model = handle(ForwardPlan(token_budget, packing), dtype, temperature=0.7)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=dtype)
    with torch.no_grad():
        expected = one_by_one(reference, rows, 0.7)
    found = model.score(rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT[dtype])
    assert float(expected[0].std()) > 1  # logprobs far apart, so that a wrong one would show


@pytest.mark.parametrize("packing", [True, False])
def test_gradients_are_those_of_each_row_alone(tiny: Path, handle: Build, rows: Batch, packing: bool) -> None:
    weights = torch.randn(2, *rows.response_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    logprobs, entropy = one_by_one(reference, rows)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()

    model = handle(ForwardPlan(40, packing))
    with model.training():
        for part in model.plan.micro_batches(rows):
            logprobs, entropy = model.score(take(rows, part))
            (logprobs * weights[0][part] + entropy * weights[1][part]).sum().backward()
    for (name, found), expected in zip(named_gradients(model), reference.parameters(), strict=True):
        assert expected.grad is not None
        assert float((found - expected.grad).norm() / expected.grad.norm()) < 1e-12, name


def named_gradients(model: CausalLM) -> list[tuple[str, torch.Tensor]]:
    assert model._forward is not None
    named = [(name, parameter.grad) for name, parameter in model._forward.named_parameters()]
    assert all(gradient is not None for _, gradient in named)
    return named  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_neighbour_leaves_a_packed_row_as_it_was(handle: Build, rows: Batch, dtype: torch.dtype) -> None:
    model = handle(ForwardPlan(), dtype)
    before = model.logprobs(rows)
    changed = rows.response_ids.clone()
    changed[2] = (changed[2] + 1) % 128
    after = model.logprobs(replace(rows, response_ids=changed))
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[2], before[2])


def test_a_score_belongs_to_the_token_it_stands_at(tmp_path: Path) -> None:
    # A model without layers to speak of, whose output layer names the token after the one it reads: the hidden state
    # of token i is the unit vector i, the output weight of token i + 1 is 20 times it.
    folder = write_tiny_model(tmp_path / "next", hidden_size=128, layers=1, tie=False)
    model = CausalLM(str(folder))
    scoring = model.load(folder, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in scoring.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        scoring.model.model.embed_tokens.weight.copy_(torch.eye(128))
        scoring.model.get_output_embeddings().weight.copy_(20 * torch.eye(128).roll(1, dims=0))
    model.attach(scoring, ForwardPlan())
    rows = random_rows((2, 3), (4, 2))
    rows.response_ids[0] = torch.arange(5, 9)
    rows.response_ids[1, :2] = torch.tensor([50, 52])  # the second does not follow the first
    rows.prompt_ids.values[1], rows.prompt_ids.values[4] = 4, 49
    logprobs = model.logprobs(rows)
    assert float(logprobs[0].abs().max()) < 1e-6
    assert float(logprobs[1, 0].abs()) < 1e-6
    assert float(logprobs[1, 1]) < -100


def test_padding_scores_zero(handle: Build, rows: Batch) -> None:
    logprobs, entropy = handle(ForwardPlan()).score(rows)
    assert not logprobs[~rows.loss_mask].any()
    assert not entropy[~rows.loss_mask].any()
    assert bool((entropy[rows.loss_mask] > 0).all())


def test_what_stands_in_the_padding_is_never_read(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan())
    filled = rows.response_ids.masked_fill(~rows.loss_mask, 77)
    assert torch.equal(model.logprobs(replace(rows, response_ids=filled)), model.logprobs(rows))


def test_scoring_twice_gives_the_same_bits(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan(40), torch.float32)
    assert torch.equal(model.logprobs(rows), model.logprobs(rows))


def test_packed_rows_forward_no_token_in_vain(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan(40))
    assert model._forward is not None
    forwarded: list[int] = []
    model._forward.register_forward_pre_hook(lambda _, arguments: forwarded.append(arguments[0].numel()))
    model.score(rows)
    # Prompt and response without its last token, in the rows that have a response: 7 + 17 + 7 + 31 + 14.
    assert sum(forwarded) == 76


def test_padded_rows_of_like_length_forward_few_tokens_in_vain() -> None:
    rows = random_rows((5,) * 256, tuple(1 + (i * 97) % 250 for i in range(256)))
    plan = ForwardPlan(token_budget=4096, packing=False)
    inputs = [plan.model_input(take(rows, part)) for part in plan.micro_batches(rows)]
    forwarded, useful = (sum(n) for n in zip(*((i.input_ids.numel(), i.useful_tokens) for i in inputs), strict=True))
    assert useful < forwarded <= 1.2 * useful  # 36,859 for 33,110; in the order given it would be twice as many


def test_without_rows_every_parameter_gets_a_zero_gradient(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan())
    with model.training():
        logprobs, entropy = model.score(take(rows, torch.tensor([], dtype=torch.int64)))
        assert logprobs.shape == entropy.shape == (0, 30)
        (logprobs.sum() + entropy.sum()).backward()
    assert not any(gradient.any() for _, gradient in named_gradients(model))


def test_without_rows_scores_are_empty(handle: Build, rows: Batch) -> None:
    logprobs, entropy = handle(ForwardPlan()).score(take(rows, torch.tensor([], dtype=torch.int64)))
    assert logprobs.shape == entropy.shape == (0, 30)


@pytest.mark.parametrize("packing", [True, False])
def test_as_many_forward_passes_are_made_as_the_ranks_agree_on(handle: Build, rows: Batch, packing: bool) -> None:
    expected = handle(ForwardPlan()).logprobs(rows)
    model = handle(ForwardPlan(4096, packing, agree=lambda own: own + 8))
    calls: list[int] = []
    assert model._forward is not None
    model._forward.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model.logprobs(rows), expected, rtol=0, atol=1e-12)
    assert len(calls) == 9


def test_gradients_flow_only_within_training(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan())
    assert model._forward is not None
    assert not model.logprobs(rows).requires_grad
    with model.training():
        assert model.logprobs(rows).requires_grad
        assert model._forward.training
    assert not model.logprobs(rows).requires_grad
    assert not model._forward.training


def test_one_forward_may_be_asked_for_several_times_in_training(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan())
    with model.training():
        (model.logprobs(rows).sum() + model.entropy(rows).sum()).backward()
    twice = dict(named_gradients(model))
    both = handle(ForwardPlan())
    with both.training():
        logprobs, entropy = both.score(rows)
        (logprobs.sum() + entropy.sum()).backward()
    for name, gradient in named_gradients(both):
        # The layers' norms compute in float32 even in a float64 model.
        assert float((twice[name] - gradient).norm() / gradient.norm()) < 1e-6, name


def test_a_frozen_model_has_no_optimizer_and_no_gradient(handle: Build, rows: Batch) -> None:
    model = handle(ForwardPlan(), trainable=False)
    assert model.optimizer is None
    assert model._forward is not None
    assert not any(parameter.requires_grad for parameter in model._forward.parameters())


def test_a_trainable_model_has_the_default_optimizer() -> None:
    assert CausalLM("tiny").optimizer == Optimizer()


def test_bfloat16_scores_are_float32(handle: Build, rows: Batch) -> None:
    logprobs = handle(ForwardPlan(), torch.bfloat16).logprobs(rows)
    assert logprobs.dtype == torch.float32
    # bfloat16 has 8 bits: logits of about 10 are known to about 0.04.
    assert float((logprobs - handle(ForwardPlan()).logprobs(rows)).abs().mean()) < 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "`temperature` is 0.0"),
        ({"trainable": False, "optimizer": Optimizer()}, "`optimizer` is given for 'tiny', which is frozen"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CausalLM("tiny", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("trusts", [False, True])
def test_models_derived_from_a_model_have_its_trust_remote_code(trusts: bool) -> None:
    whole, adapted = (CausalLM("tiny", lora=lora, trust_remote_code=trusts) for lora in (None, LoRA()))
    followers = [whole.initial(), whole.averaged(0.9), adapted.initial(), adapted.without_adapters()]
    assert [follower.trust_remote_code for follower in followers] == [trusts] * 4
