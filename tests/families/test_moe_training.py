"""Training of mixtures of experts: balanced, with frozen routers, and with the experts that an engine chose."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlflow import CausalLM
from rlflow.errors import UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.moe import MoE, check_moe
from rlflow.rollout import Completion, EngineSubprocess, Sampling, TransformersEngine, VLLMEngine
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged
from tests.families.gap import LIMIT, SEEDS, tensors
from tests.families.moe import COEF, STRATEGIES, moe_update, plain_moe_update
from tests.ranks import RankPool
from tests.rollout.trained import PROMPTS, STOP, setup
from tests.strategies.reference import distance

CPU = torch.device("cpu")
Family = Callable[[str], Path]
slow = pytest.mark.slow
EACH = ["qwen3_moe", pytest.param("mixtral", marks=slow), pytest.param("gpt_oss", marks=slow)]
BALANCED = MoE(router_aux_loss_coef=COEF)
REPLAYED = MoE(router_aux_loss_coef=COEF, routing_replay=True)
FROZEN = MoE(freeze_router=True, routing_replay=True)


@cache
def gradient(name: str, folder: Path, coef: float, replay: bool, frozen: bool = False) -> dict[str, Tensor]:
    """Gradient of the update in float64, a row at a time."""
    return plain_moe_update(name, folder, coef, replay, frozen)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("ranks", ["ranks2", pytest.param("ranks1", marks=slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "moe", [pytest.param(BALANCED, id="balanced", marks=slow), pytest.param(REPLAYED, id="replayed")]
)
def test_the_gradient_is_that_of_single_rows(
    moe: MoE, strategy: str, ranks: str, name: str, family: Family, request: pytest.FixtureRequest
) -> None:
    folder, pool = family(name), request.getfixturevalue(ranks)
    expected = gradient(name, folder, moe.router_aux_loss_coef, moe.routing_replay)
    assert distance(gradient(name, folder, 0.0, moe.routing_replay), expected) > 0.01  # the loss of the load counts
    assert distance(gradient(name, folder, moe.router_aux_loss_coef, not moe.routing_replay), expected) > 0.1
    for outcome in pool.run(moe_update, name, folder, strategy, moe):
        assert distance(outcome.gradients[0], expected) < 1e-5


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=slow), "zero3"])
def test_a_frozen_router_is_left_as_it_is_and_all_else_learns(
    strategy: str, name: str, family: Family, ranks2: RankPool
) -> None:
    folder = family(name)
    expected = gradient(name, folder, 0.0, True, frozen=True)
    before = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    routers = before.keys() - expected.keys()
    assert len(routers) == (4 if name == "gpt_oss" else 2)
    for outcome in ranks2.run(moe_update, name, folder, strategy, FROZEN):
        assert distance(outcome.gradients[0], expected) < 1e-5
        assert {key for key, weight in outcome.weights.items() if torch.equal(weight, before[key])} == routers


@pytest.mark.parametrize("name", EACH)
def test_a_checkpointed_layer_uses_the_replayed_experts_again(name: str, family: Family, ranks1: RankPool) -> None:
    (plain,) = ranks1.run(moe_update, name, family(name), "zero2", REPLAYED)
    (checkpointed,) = ranks1.run(moe_update, name, family(name), "zero2", REPLAYED, True)
    assert distance(checkpointed.gradients[0], {k: v.double() for k, v in plain.gradients[0].items()}) < 1e-6


def telling(folder: Path, **settings: int) -> Any:
    """The reference engine, asked for experts."""
    engine = TransformersEngine(**settings)
    engine.return_experts()
    return setup(engine, folder)


def generate(engine: Any, model: Any, tokens: int = 24) -> list[Completion]:
    """With the model's weights."""
    engine.update_weights([tensors(model)], 0)
    completions: list[Completion] = engine.generate(PROMPTS, SEEDS, Sampling(tokens, 1.0, (*STOP, *range(40, 50))), 0)
    return completions


def responses(completions: list[Completion], told: bool = True) -> TokenRows:
    """The responses as rows to score."""
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    ids = torch.zeros(len(completions), int(lengths.max()), dtype=torch.int64)
    for row, completion in enumerate(completions):
        ids[row, : lengths[row]] = torch.tensor(completion.token_ids)
    experts = [torch.from_numpy(completion.columns["experts"]) for completion in completions]
    ragged = Ragged(torch.cat(experts), torch.tensor([len(of_row) for of_row in experts]))
    return TokenRows(Ragged.from_lists(PROMPTS), ids, lengths, {"experts": ragged} if told else {})


def attached(folder: Path, moe: MoE | None = None) -> tuple[CausalLM, Any]:
    """A handle, and its model."""
    handle = CausalLM(str(folder), moe=moe)
    model = handle.load(folder, torch.float32, CPU)
    handle.attach(model, ForwardPlan(40))  # several forward passes
    return handle, model


@pytest.mark.parametrize("name", EACH)
def test_the_reference_engine_reports_the_experts_of_every_token_that_it_reads(name: str, family: Family) -> None:
    folder = family(name)
    _, model = attached(folder)
    # Prompts are read in parts of two tokens, and rows leave the batch when they end.
    completions = generate(telling(folder, max_batch=4, max_prefill_tokens=8), model)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert len({len(completion.token_ids) for completion in completions}) > 2
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.columns["experts"].dtype == "uint8"
        tokens = torch.tensor([[*prompt, *completion.token_ids[:-1]]])
        logits = plain(tokens, output_router_logits=True).router_logits  # of each layer, [N, E]
        expected = torch.stack([of_layer.topk(2).indices for of_layer in logits], dim=1)
        assert torch.equal(torch.from_numpy(completion.columns["experts"]).long(), expected)


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_reports_the_same_experts(family: Family) -> None:
    folder = family("qwen3_moe")
    _, model = attached(folder)
    expected = generate(telling(folder), model)
    engine = TransformersEngine()
    engine.return_experts()
    beside = EngineSubprocess(engine, index=0, size=1, address="", timeout_s=120.0)
    setup(beside, folder)
    found = generate(beside, model)
    beside.close()
    for one, other in zip(found, expected, strict=True):
        assert (one.columns["experts"] == other.columns["experts"]).all()


def with_near_ties(model: Any, sign: float) -> Any:
    """The model with routers in which three rows are equal, up to less than a millionth of either sign."""
    changed = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                weight[:3] = weight[0] + sign * 1e-7 * torch.randn(3, weight.shape[1], generator=noise)
            elif name.endswith("mlp.router.bias"):
                weight[:3] = weight[0]
    return changed


@pytest.mark.parametrize("name", EACH)
def test_replayed_experts_give_the_engine_s_logprobs_where_routers_choose_others(name: str, family: Family) -> None:
    folder = family(name)
    _, loaded = attached(folder)
    completions = generate(telling(folder), with_near_ties(loaded, 1.0))
    told = torch.cat([torch.tensor(completion.logprobs) for completion in completions])

    def gap(moe: MoE | None) -> tuple[float, Any]:
        handle, model = attached(folder, moe)
        model.load_state_dict(with_near_ties(loaded, -1.0).state_dict())
        rows = responses(completions)
        mask = torch.arange(rows.response_ids.shape[1]) < rows.lengths[:, None]
        scored = handle.logprobs(rows)[mask]
        with handle.training():
            handle.logprobs(rows)
        return float((scored - told).abs().max()), handle.take_routed()

    difference, (_, otherwise, replayed) = gap(MoE(routing_replay=True))
    assert difference < LIMIT
    assert replayed == 2 * sum(len(completion.columns["experts"]) for completion in completions)
    assert int(otherwise) / replayed > 0.01
    assert gap(None)[0] > 1e-2


def test_experts_replay_only_where_rows_have_them(family: Family) -> None:
    folder = family("qwen3_moe")
    handle, model = attached(folder, MoE(routing_replay=True))
    rows = responses(generate(telling(folder), model))
    expected = handle.logprobs(dataclasses.replace(rows, columns={}))
    torch.testing.assert_close(handle.logprobs(rows), expected, rtol=0, atol=1e-6)
    others = dataclasses.replace(rows.columns["experts"], values=(rows.columns["experts"].values + 1) % 8)
    assert float((handle.logprobs(dataclasses.replace(rows, columns={"experts": others})) - expected).abs().max()) > 0.1
    with handle.training(), pytest.raises(UserError, match=r"^`moe\.routing_replay` is set .* have no `experts`;"):
        handle.logprobs(dataclasses.replace(rows, columns={}))


def test_vllm_is_not_asked_for_experts() -> None:
    with pytest.raises(
        UserError,
        match=r"^`moe\.routing_replay` is set, and `rollout` is VLLMEngine, which does not report which experts it",
    ):
        VLLMEngine().return_experts()


@pytest.mark.parametrize(
    ("name", "told"), [("qwen2", "has no experts"), ("qwen3_moe", None), ("mixtral", None), ("gpt_oss", None)]
)
def test_settings_of_experts_need_a_model_that_has_them(name: str, told: str | None, family: Family) -> None:
    config = AutoConfig.from_pretrained(family(name))
    if told is None:
        check_moe(config, "`moe`")
        return
    with pytest.raises(UserError, match=rf"^`moe` is given, and the model, of the type 'qwen2', {told}; leave it out"):
        check_moe(config, "`moe`")
