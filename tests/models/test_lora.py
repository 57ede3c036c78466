from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, LoRA, UserError, ValueModel
from rlflow.models.handle import ForwardPlan
from rlflow.models.lora import adapter_of
from rlflow.models.packed import OneDNNLinear, PackedModel
from rlflow.models.weights import Weight
from rlflow.values.batch import Batch
from tests.models.conftest import one_by_one

CPU = torch.device("cpu")


def adapted(folder: Path, lora: LoRA, dtype: torch.dtype = torch.float64, trained: bool = True) -> CausalLM:
    """An attached model whose adapters are not zero any more, unless `trained` is off."""
    handle = CausalLM(str(folder), lora=lora)
    model = handle.load(folder, dtype, CPU)
    handle.attach(model, ForwardPlan(40))
    if trained:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.data.copy_(0.3 * drawn)
    return handle


def loaded(handle: CausalLM) -> PackedModel:
    assert isinstance(handle._forward, PackedModel)
    return handle._forward


def own_peft(handle: CausalLM, folder: Path, config: LoraConfig) -> torch.nn.Module:
    """peft's own model with the handle's adapters, in float64."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), config)
    own = dict(model.named_parameters())
    for name, parameter in loaded(handle).named_parameters():
        if "lora_" in name:
            own["base_model." + name].data = parameter.detach().clone()
    return model


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_scores_and_gradients_are_those_of_peft_s_own_model(tiny: Path, rows: Batch, targets: object) -> None:
    handle = adapted(tiny, LoRA(rank=3, alpha=5.0, targets=targets))  # type: ignore[arg-type]
    names = targets if isinstance(targets, str) else list(targets)  # type: ignore[call-overload]
    config = LoraConfig(r=3, lora_alpha=5, target_modules=names, task_type="CAUSAL_LM")
    reference = own_peft(handle, tiny, config)
    expected, entropy = one_by_one(reference, rows)
    (expected.sum() + entropy.sum()).backward()
    torch.testing.assert_close(handle.logprobs(rows), expected.detach(), rtol=0, atol=1e-12)

    with handle.training():
        found, entropy = handle.score(rows)
        (found.sum() + entropy.sum()).backward()
    own = dict(reference.named_parameters())
    trained = {name: p for name, p in loaded(handle).named_parameters() if p.requires_grad}
    assert {"base_model." + name for name in trained} == {name for name, p in own.items() if p.requires_grad}
    for name, parameter in trained.items():
        wanted = own["base_model." + name].grad
        assert float((parameter.grad - wanted).norm() / wanted.norm()) < 1e-6, name


def test_new_adapters_change_nothing(tiny: Path, rows: Batch) -> None:
    with_new = adapted(tiny, LoRA(), trained=False).logprobs(rows)
    plain = CausalLM(str(tiny))
    plain.attach(plain.load(tiny, torch.float64, CPU), ForwardPlan(40))
    torch.testing.assert_close(with_new, plain.logprobs(rows), rtol=0, atol=1e-12)


def test_without_adapters_a_model_scores_as_before_its_training(tiny: Path, rows: Batch) -> None:
    before = adapted(tiny, LoRA(), torch.float32, trained=False).logprobs(rows)
    actor = adapted(tiny, LoRA(dropout=0.5), torch.float32)
    reference = actor.without_adapters()
    reference.attach_to_owner()
    assert torch.equal(reference.logprobs(rows), before)
    assert not torch.equal(actor.logprobs(rows), before)  # they are on again
    with actor.training():
        assert torch.equal(reference.logprobs(rows), before)
        assert not reference.logprobs(rows).requires_grad
        assert actor.logprobs(rows).requires_grad
    assert (reference.trainable, reference.optimizer) == (False, None)


def test_dropout_is_drawn_in_training_only(tiny: Path, rows: Batch) -> None:
    actor = adapted(tiny, LoRA(dropout=0.5))
    assert torch.equal(actor.logprobs(rows), actor.logprobs(rows))
    with actor.training():
        assert not torch.equal(actor.logprobs(rows), actor.logprobs(rows))


def test_only_adapters_and_the_critic_s_output_layer_are_trained(tiny: Path) -> None:
    model = ValueModel(str(tiny), lora=LoRA()).load(tiny, torch.float32, CPU)
    linear = 2 * 7  # in two layers: q, k, v, o, gate, up, down
    names = [weight.name for weight in model.trained()]
    assert len(names) == 2 * linear + 1
    assert {name.rsplit(".", 2)[-2] for name in names} == {"lora_A", "lora_B", "score"}


def test_a_base_layer_still_computes_by_onednn(tiny: Path) -> None:
    model = CausalLM(str(tiny), lora=LoRA()).load(tiny, torch.float32, CPU)
    assert {type(layer.base_layer) for layer in adapter_of(model).values()} == {OneDNNLinear}


def test_adapters_are_a_function_of_the_run_s_seed_and_the_layer(tiny: Path) -> None:
    def drawn(seed: int) -> list[Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.rand(seed)  # what else was drawn does not count
            model = CausalLM(str(tiny), lora=LoRA()).load(tiny, torch.float32, CPU)
        return [layer.lora_A["default"].weight for layer in adapter_of(model).values()]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_merged_weight_is_summed_wide_and_rounded_once(tiny: Path, dtype: torch.dtype) -> None:
    model = loaded(adapted(tiny, LoRA(rank=4, alpha=6.0), dtype))
    merged = [weight for weight in model.weights() if weight.adapter is not None]
    assert len(merged) == 14
    for weight in merged:
        base, a, b = (parameter.detach().double() for parameter in weight.parameters)
        exact = base + 6.0 / 4 * b @ a
        rounding = max(torch.finfo(dtype).eps / 2, 1e-6) * 1.001  # once; a sum in float32 may move a tie
        torch.testing.assert_close(weight.value().double(), exact, rtol=rounding, atol=1e-7)
        assert torch.equal(weight.parameter.double(), base)
    if dtype == torch.bfloat16:
        # Rounding product and sum, as merging in place does, is not the same.
        _, a, b = merged[0].parameters
        twice = merged[0].parameter + (1.5 * (b @ a)).to(dtype)
        assert not torch.equal(twice, merged[0].value())


def test_weights_have_the_names_of_the_model_without_adapters(tiny: Path) -> None:
    model = loaded(adapted(tiny, LoRA()))
    names = {name for name, _ in AutoModelForCausalLM.from_pretrained(tiny).named_parameters()}
    assert {weight.name for weight in model.weights()} == names


def test_a_weight_without_an_adapter_is_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert Weight("norm.weight", parameter).value().data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize(
    ("targets", "told"),
    [(("nonesuch",), r"Target modules \{'nonesuch'\} not found"), (("embed_tokens",), "is not a linear layer")],
)
def test_targets_that_cannot_be_adapted_are_refused_in_one_line(
    tiny: Path, targets: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told) as refusal:
        CausalLM(str(tiny), lora=LoRA(targets=targets)).load(tiny, torch.float32, CPU)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rank": 0}, "`lora.rank` is 0"),
        ({"alpha": 0.0}, "`lora.alpha` is 0.0"),
        ({"dropout": 1.0}, "`lora.dropout` is 1.0"),
        ({"targets": ()}, "`lora.targets` is empty"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        LoRA(**settings)  # type: ignore[arg-type]


def test_a_frozen_model_with_adapters_and_a_view_without_any_are_refused() -> None:
    with pytest.raises(UserError, match="`lora` is given for 'tiny', which is frozen"):
        CausalLM("tiny", trainable=False, lora=LoRA())
    with pytest.raises(UserError, match="has no adapters to leave out"):
        CausalLM("tiny").without_adapters()
