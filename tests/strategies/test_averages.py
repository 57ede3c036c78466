"""A moving average of a trained model, and divergence from a frozen one, at every strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.lora import LoRA
from rlflow.models.tiny import write_tiny_model
from rlflow.values.layout import Layout
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.averages import DECAY, STEPS, Seen, averaged_steps, kl_gradient, third_step
from tests.strategies.reference import distance
from tests.strategies.state import put_together
from tests.strategies.strategy_update import MICRO_BATCHES, Stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices ZeRO-3 divides."""
    return write_tiny_model(tmp_path_factory.mktemp("averages") / "tiny", hidden_size=128, layers=1)


def weights_of(ranks: list[Seen], which: str) -> dict[str, Tensor]:
    return {key: of["weight"] for key, of in put_together([getattr(seen, which) for seen in ranks]).items()}


def follows(outcomes: list[tuple[list[Seen], Tensor]], model: Path, precision: str) -> None:
    """Compare each step's average with one worked out from the owner's weights of that step, in float32."""
    start = {key: tensor.to(DTYPES[precision]) for key, tensor in load_file(model / "model.safetensors").items()}
    average = weights_of([steps[0] for steps, _ in outcomes], "average")
    assert all(torch.equal(tensor.to(start[key].dtype), start[key]) for key, tensor in average.items())
    for step in range(1, STEPS + 1):
        ranks = [steps[step] for steps, _ in outcomes]
        owner = weights_of(ranks, "owner")
        average = {key: tensor + (owner[key] - tensor) * (1 - DECAY) for key, tensor in average.items()}
        found = weights_of(ranks, "average")
        for key, tensor in average.items():
            assert torch.equal(found[key], tensor), (step, key)
            assert all(torch.equal(seen.weights[key], tensor.to(DTYPES[precision])) for seen in ranks), (step, key)
        assert distance(average, owner) > 1e-4  # it is not the owner
    scores = alone_with({key: tensor.to(DTYPES[precision]) for key, tensor in average.items()}, model, precision)
    for _, found in outcomes:
        torch.testing.assert_close(found, scores, rtol=0, atol=1e-5 if precision == "fp32" else 0.05)


def alone_with(weights: dict[str, Tensor], model: Path, precision: str) -> Tensor:
    """The scores of a plain model with these weights."""
    from rlflow.models.handle import ForwardPlan
    from tests.strategies.reference import TEMPERATURE
    from tests.strategies.strategy_update import rows_of

    plain = CausalLM(str(model), trainable=False, temperature=TEMPERATURE)
    loaded = plain.load(model, DTYPES[precision], torch.device("cpu"))
    for weight in loaded.weights():
        weight.parameter.data.copy_(weights[weight.name])
    plain.attach(loaded, ForwardPlan())
    return plain.logprobs(rows_of([0, 1, 2]))


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but(
        [(3, "bf16")],
        [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16")],
    ),
)
def test_three_steps_match_an_average_by_hand_and_resume_to_the_bit(
    stage: Stage, precision: str, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    outcomes = ranks2.run(averaged_steps, model, stage, precision, tmp_path, {})
    follows(outcomes, model, precision)
    if stage == 0:  # in bf16 DeepSpeed's optimizer makes a step when it is built, which Adam counts: not after a load
        return
    continued = ranks2.run(third_step, model, stage, precision, tmp_path)
    for which in ("owner", "average"):
        expected = weights_of([steps[STEPS] for steps, _ in outcomes], which)
        found = weights_of(continued, which)
        assert [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)] == [], which


def test_one_process_averages_bf16_weights_in_float32(model: Path) -> None:
    follows([averaged_steps(model, None, "bf16", None, {})], model, "bf16")


def test_with_copies_within_a_node_the_average_is_what_all_ranks_read(model: Path, ranks4: RankPool) -> None:
    follows(ranks4.run(averaged_steps, model, 3, "fp32", None, {"hpz_partition_size": 2}), model, "fp32")


def test_a_checkpoint_of_two_ranks_of_fsdp_resumes_in_one_process(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    outcomes = ranks2.run(averaged_steps, model, "fsdp", "fp32", tmp_path, {})
    expected = weights_of([steps[STEPS] for steps, _ in outcomes], "average")
    found = weights_of([third_step(model, None, "fp32", tmp_path)], "average")
    assert distance(found, {key: tensor.double() for key, tensor in expected.items()}) < 1e-6


@cache
def exact(folder: Path, other: Path) -> tuple[dict[str, Tensor], Tensor]:
    return kl_gradient(folder, other, None, "fp64", None)


@pytest.mark.parametrize(
    ("stage", "shards"), slow_but([(3, 2), ("fsdp", 1)], [(2, 2), (3, 2), ("fsdp", 2), (2, 1), (3, 1), ("fsdp", 1)])
)
def test_divergence_and_its_gradient_are_those_of_one_process(
    stage: Stage, shards: int, tiny: Path, untied: Path, ranks2: RankPool
) -> None:
    gradient, values = exact(tiny, untied)
    for rank, (found, kls) in enumerate(ranks2.run(kl_gradient, tiny, untied, stage, "fp32", Layout((0, 1), shards))):
        assert distance(found, gradient) < 2e-6
        own = [row for rows in MICRO_BATCHES[shards][0 if shards == 1 else rank] for row in rows]
        torch.testing.assert_close(kls.double(), values[own][:, : kls.shape[1]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CausalLM("tiny").averaged(1.0), "`decay` of `averaged` is 1.0"),
        (lambda: CausalLM("tiny", trainable=False).averaged(0.9), "'tiny' is frozen, so its average never moves"),
        (lambda: CausalLM("tiny", lora=LoRA()).averaged(0.9), "`averaged` of 'tiny', which trains adapters"),
    ],
)
def test_what_has_no_average_is_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
