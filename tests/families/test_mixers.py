"""Models whose layers carry a state: rows of any length, packed, have the numbers of each row alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, LoRA
from rlflow.errors import UserError
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.handle import ForwardPlan
from rlflow.models.mixers import MixerOfRows
from rlflow.models.scalar import ValueModel
from rlflow.strategies.single import SingleProcess
from rlflow.testing.derivative import wide_casts
from tests.families.models import STATEFUL
from tests.families.test_training import SGD, own_logprobs, reference
from tests.prefix_rows import rows_of
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.lora import two_gradients, two_gradients_on_ranks
from tests.strategies.reference import distance
from tests.strategies.strategy_update import Stage, frozen_scores, one_update

CPU = torch.device("cpu")
Family = Callable[[str], Path]
# Prompts and responses: rows of one token, of a few, and of several chunks of a scan (8) and of a delta rule (64)
LENGTHS = [(1, 1), (3, 140), (70, 2), (1, 1), (2, 1), (5, 17), (9, 0), (1, 66)]
GENERATOR = torch.Generator().manual_seed(0)
PAIRS = [tuple(torch.randint(2, 120, (n,), generator=GENERATOR).tolist() for n in lengths) for lengths in LENGTHS]
ROWS = rows_of(PAIRS)  # type: ignore[arg-type]
NOISE = torch.randn(ROWS.response_ids.shape, generator=GENERATOR, dtype=torch.float64)


@cache
def alone(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs `[B, T]` and the gradient of their sum, weighted, in float64: each row by transformers, by itself."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    found = torch.zeros_like(NOISE)
    with wide_casts():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
        for row, (prompt, response) in enumerate(PAIRS):
            if response:
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
                (NOISE[row, : len(response)] * logprobs).sum().backward()
                found[row, : len(response)] = logprobs.detach()
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


def together(
    folder: Path, dtype: torch.dtype, plan: ForwardPlan, **settings: Any
) -> tuple[Tensor, dict[str, Tensor], CausalLM]:
    """The same by one forward pass of rlflow."""
    handle = CausalLM(str(folder), **settings)
    model = handle.load(folder, dtype, CPU)
    handle.attach(model, plan)
    with handle.training():
        logprobs = handle.logprobs(ROWS)
    (NOISE.to(dtype) * logprobs).sum().backward()
    gradient = {model.hf_name(name): parameter.grad for name, parameter in model.named_parameters()}
    return logprobs.detach(), gradient, handle  # type: ignore[return-value]


WAYS = {"packed": ({}, {}), "padded": ({"packing": False}, {}), "checkpointed": ({}, {"gradient_checkpointing": True})}


@pytest.mark.parametrize("way", slow_but(["packed", "checkpointed"], WAYS))
@pytest.mark.parametrize("name", slow_but(["qwen3_5", "falcon_h1", "lfm2"], STATEFUL))
def test_rows_together_have_the_logprobs_and_gradients_of_each_row_alone(name: str, way: str, family: Family) -> None:
    expected, gradient = alone(family(name))
    plan, settings = WAYS[way]
    with wide_casts():
        logprobs, found, _ = together(family(name), torch.float64, ForwardPlan(**plan), **settings)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-10)
    assert distance(found, gradient) < 1e-10


@pytest.mark.parametrize("name", slow_but(["qwen3_5"], STATEFUL))
def test_in_float32_rows_together_are_rows_alone_up_to_rounding(name: str, family: Family) -> None:
    expected, gradient = alone(family(name))
    logprobs, found, _ = together(family(name), torch.float32, ForwardPlan())
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-5)
    assert distance(found, gradient) < 1e-5


@pytest.mark.parametrize("name", slow_but(["qwen3_5"], STATEFUL))
def test_micro_batches_are_of_rows_that_the_budget_holds_side_by_side(name: str, family: Family) -> None:
    handle = CausalLM(str(family(name)))
    handle.attach(handle.load(family(name), torch.float32, CPU), ForwardPlan(150))
    parts = handle.plan.split(ROWS)
    costs = torch.tensor([(prompt + response - 1) * (response > 0) for prompt, response in LENGTHS])
    # rows of 142, 71, 66, 21, 2, 1 and 1 tokens, and one that is not read
    assert [costs[part].tolist() for part in parts] == [[142], [71, 66], [1, 1, 2, 21, 0]]
    with torch.no_grad():
        logprobs = handle.logprobs(ROWS)
    torch.testing.assert_close(logprobs.double(), alone(family(name))[0], rtol=0, atol=2e-5)


def test_a_prefix_that_rows_share_is_read_by_each(family: Family) -> None:
    shared = rows_of([([*range(2, 20)], [20, 21]), ([*range(2, 20)], [22])])
    handle = CausalLM(str(family("qwen3_5")))
    handle.attach(handle.load(family("qwen3_5"), torch.float32, CPU), ForwardPlan(share_prefixes=True))
    line = handle.plan.model_input(shared)
    assert line.prefixes is None
    assert line.useful_tokens == 19 + 18


def test_values_with_adapters_are_those_of_each_row_alone(family: Family) -> None:
    folder = family("qwen3_5")
    critic = ValueModel(str(folder), lora=LoRA(4))
    model = critic.load(folder, torch.float64, CPU)
    for weight in model.trained():
        torch.nn.init.normal_(weight.parameter, std=0.1)
    critic.attach(model, ForwardPlan())
    with wide_casts(), torch.no_grad():
        together = critic.values(ROWS)
        for row in range(len(PAIRS)):
            one = rows_of([PAIRS[row]])  # type: ignore[list-item]
            found = critic.values(one)
            torch.testing.assert_close(together[row, : found.shape[1]], found[0], rtol=0, atol=1e-10)
    assert len(together[together != 0].unique()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, "fsdp"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpointed_update_on_two_ranks_is_that_of_single_rows(
    name: str, stage: Stage, family: Family, ranks2: RankPool
) -> None:
    gradient, weights = reference(family(name))
    for outcome in ranks2.run(one_update, family(name), stage, "fp32", SGD, True):
        assert distance(outcome.gradients[0], gradient) < 1e-5
        assert distance(outcome.weights, weights) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, "fsdp"])
@pytest.mark.parametrize("name", STATEFUL)
def test_an_update_in_bf16_and_a_frozen_reference_pass_the_check(
    name: str, stage: Stage, family: Family, ranks2: RankPool
) -> None:
    gradient, _ = reference(family(name))
    for outcome in ranks2.run(one_update, family(name), stage, "bf16", SGD):
        assert distance(outcome.gradients[0], gradient) < 0.3  # seen 0.01 to 0.17
    scores, wants_gradients = ranks2.run(frozen_scores, family(name), stage)[0]
    assert not wants_gradients
    mask = scores != 0
    torch.testing.assert_close(scores[mask].double(), own_logprobs(family(name)), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, "fsdp"])
@pytest.mark.parametrize("name", STATEFUL)
def test_adapters_train_on_two_ranks_as_in_one_process(
    name: str, stage: Stage, family: Family, ranks2: RankPool
) -> None:
    strategy = SingleProcess("fp64")
    Fabric(accelerator="cpu", devices=1, strategy=strategy.processes).launch()
    with wide_casts():
        alone = two_gradients(strategy, family(name))
    assert all(float(gradient.abs().sum()) > 0 for gradient in alone[1].values())
    for found in ranks2.run(two_gradients_on_ranks, family(name), stage):
        assert distance(found[0], alone[0]) < 1e-5
        assert distance(found[1], alone[1]) < 5e-5  # the first update's rounding in it


@pytest.mark.parametrize(("dtype", "seen_in"), [(torch.float32, ""), (torch.bfloat16, ", in float32,")])
@pytest.mark.parametrize("name", slow_but(["falcon_h1"], STATEFUL))
def test_a_state_that_passes_to_the_next_row_is_refused_at_loading(
    name: str, dtype: torch.dtype, seen_in: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(mixer: Any, hidden_states: Tensor, seq_idx: Tensor | None = None, **keywords: Any) -> Any:
        return super(MixerOfRows, mixer).forward(hidden_states, **keywords)  # type: ignore[misc]

    model = ScoringModel.load(family(name), dtype, CPU)
    model.check(model, CPU)
    monkeypatch.setattr(MixerOfRows, "forward", forward)
    # In bfloat16 a quarter of a nat is allowed for rounding, and more; these differ by 0.05 to 0.43 per token.
    with pytest.raises(UserError, match=rf"cannot be scored here: its own forward and the packed one{seen_in} differ"):
        model.check(model, CPU)
