from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.packing import take
from rlflow.models.scalar import ValueModel
from rlflow.values.batch import Batch
from tests.models.conftest import scalars_one_by_one

CPU = torch.device("cpu")
EXACT = {torch.float32: 1e-4, torch.float64: 1e-12}


def attached(folder: Path, plan: ForwardPlan, dtype: torch.dtype = torch.float64) -> ValueModel:
    model = ValueModel(str(folder))
    model.attach(model.load(folder, dtype, CPU), plan)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("token_budget", [1, 40, 4096])
def test_values_are_those_of_the_model_s_own_forward(
    classifier: Path, rows: Batch, dtype: torch.dtype, packing: bool, token_budget: int
) -> None:
    model = attached(classifier, ForwardPlan(token_budget, packing), dtype)
    with torch.no_grad():
        reference = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=dtype)
        before, final = scalars_one_by_one(reference, rows)
    torch.testing.assert_close(model.values(rows), before, rtol=0, atol=EXACT[dtype])
    torch.testing.assert_close(model.final_values(rows), final, rtol=0, atol=EXACT[dtype])
    assert float(before[2].std()) > 1  # values far apart, so that a wrong one would show


@pytest.mark.parametrize("packing", [True, False])
def test_gradients_are_those_of_the_model_s_own_forward(classifier: Path, rows: Batch, packing: bool) -> None:
    weights = torch.randn(rows.response_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float64)
    before, final = scalars_one_by_one(reference, rows)
    ((before * weights).sum() + (final * weights[:, 0]).sum()).backward()

    model = attached(classifier, ForwardPlan(40, packing))
    with model.training():
        for part in model.plan.micro_batches(rows):
            some = take(rows, part)
            loss = (model.values(some) * weights[part]).sum() + (model.final_values(some) * weights[part, 0]).sum()
            loss.backward()
    assert model._forward is not None
    expected = dict(reference.named_parameters())
    for name, parameter in model._forward.named_parameters():
        wanted = expected[name.removeprefix("model.")].grad
        # The layers' norms compute in float32 even in a float64 model.
        assert float((parameter.grad - wanted).norm() / wanted.norm()) < 1e-6, name


def test_a_critic_made_from_a_language_model_starts_with_values_of_zero(tiny: Path, rows: Batch) -> None:
    model = attached(tiny, ForwardPlan())
    assert not model.values(rows).any()
    with model.training():
        model.values(rows).sum().backward()
    assert model._forward is not None
    assert model._forward.get_parameter("model.score.weight").grad.any()  # so it does not stay there


def test_a_frozen_critic_made_from_a_language_model_is_refused(tiny: Path) -> None:
    with pytest.raises(UserError, match="has no output layer `score` to score with"):
        ValueModel(str(tiny), trainable=False).load(tiny, torch.float32, CPU)


def test_without_rows_every_parameter_gets_a_zero_gradient(classifier: Path, rows: Batch) -> None:
    model = attached(classifier, ForwardPlan())
    none = take(rows, torch.tensor([], dtype=torch.int64))
    with model.training():
        values, final = model.values(none), model.final_values(none)
        assert (values.shape, final.shape) == ((0, 30), (0,))
        (values.sum() + final.sum()).backward()
    assert model._forward is not None
    assert not any(parameter.grad.any() for parameter in model._forward.parameters())


def test_as_many_forward_passes_are_made_as_the_ranks_agree_on(classifier: Path, rows: Batch) -> None:
    model = attached(classifier, ForwardPlan(4096, agree=lambda own: own + 8))
    calls: list[int] = []
    assert model._forward is not None
    model._forward.register_forward_hook(lambda *_: calls.append(1))
    model.values(rows)
    assert len(calls) == 9
    model.final_values(rows)
    assert len(calls) == 18


def test_a_packed_row_does_not_see_its_neighbours(classifier: Path, rows: Batch) -> None:
    model = attached(classifier, ForwardPlan())
    alone = model.final_values(take(rows, torch.tensor([4])))
    torch.testing.assert_close(model.final_values(rows)[4:5], alone, rtol=0, atol=1e-12)


def test_values_of_a_bfloat16_model_are_float32(classifier: Path, rows: Batch) -> None:
    values = attached(classifier, ForwardPlan(), torch.bfloat16).values(rows)
    assert values.dtype == torch.float32
    assert bool((values != values.bfloat16()).any())  # more digits than bfloat16 has
