"""Runs that train adapters: rollout with the merged weights, the reference without a second model, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlflow import Batch, CausalLM, LoRA, Optimizer, PerToken, UserError, ValueModel, node
from rlflow.algorithms import SFT
from rlflow.models.tiny import resolve_model
from rlflow.rollout.vllm import VLLMEngine
from tests.controller.runs import (
    ZERO3,
    ActorCritic,
    AdapterGRPO,
    Fit,
    StopsAfter,
    answers,
    fit,
    sums,
)
from tests.ranks import RankPool
from tests.slow import slow_but

LENGTHS = (3, 9, 1, 12, 5, 2, 7, 4)


@pytest.mark.parametrize(
    "engine", slow_but(["transformers, one rank"], ["transformers, one rank", "vLLM, two ranks at ZeRO 3"])
)
def test_the_engine_generates_with_the_adapters_merged(
    engine: str, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    def run(**given: Any) -> Fit:
        return Fit(AdapterGRPO(str(policy)), sums(12, 3), tmp_path / "run", settings={"max_steps": 3}, **given)

    if engine == "transformers, one rank":
        results = [fit(run())]
    else:
        results = ranks2.run(fit, run(strategy=ZERO3, engine=VLLMEngine(kv_cache_gib=0.25)), timeout_s=200)
    for result in results:
        assert result.steps[0]["actor/kl"] == pytest.approx(0, abs=1e-6)
        assert result.steps[2]["actor/kl"] > 1e-3  # the policy is far from the view without adapters
        assert all(step["sync/logprob_gap_max"] < 1e-4 for step in result.steps)
    left = {path.name for path in (tmp_path / "run/model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= left
    config = json.loads((tmp_path / "run/model/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(policy)


def test_an_adapter_on_the_model_of_a_run_names_its_folder_which_peft_can_load(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/model").symlink_to(policy)
    actor = CausalLM(str(tmp_path / "sft"), lora=LoRA(4))
    model = actor.load(resolve_model(actor.model, tmp_path), torch.float32, torch.device("cpu"))
    assert model.base == str(tmp_path / "sft/model")


class _Adapters(ActorCritic):
    """Both roles train adapters, the actor's with dropout."""

    def __init__(self, model: str, rank: int) -> None:
        super().__init__(model)
        optimizer = Optimizer("adamw", lr=1e-2)
        self.actor = CausalLM(model, optimizer=optimizer, lora=LoRA(rank, dropout=0.2))
        self.critic = ValueModel(model, optimizer=optimizer, lora=LoRA(rank))


def _run(
    policy: Path, folder: Path, stop: int, ckpt_path: str | None = None, rank: int = 4, model: str | None = None
) -> None:
    module = _Adapters(model or str(policy), rank)
    given = {"max_steps": 4, "save_every_n_steps": 9, "ckpt_path": ckpt_path, "callbacks": [StopsAfter(stop)]}
    fit(Fit(module, answers(LENGTHS, 4), folder, settings=given))


def test_adapters_resume_from_a_checkpoint_to_the_bit_and_it_holds_nothing_else(policy: Path, tmp_path: Path) -> None:
    _run(policy, tmp_path / "through", 4)
    _run(policy, tmp_path / "parts", 2)
    (checkpoint,) = (tmp_path / "parts/checkpoint").iterdir()
    for role, more in (("actor", set()), ("critic", {"score.weight"})):
        kept = {name.rsplit("/", 1)[0] for name in load_file(checkpoint / f"{role}-00000-of-00001.safetensors")}
        assert {name for name in kept if "lora_" not in name} == more
    _run(policy, tmp_path / "parts", 4, "last")
    for role in ("model", "model-critic"):
        through, parts = (
            load_file(tmp_path / name / role / "adapter_model.safetensors") for name in ("through", "parts")
        )
        assert all(torch.equal(tensor, parts[name]) for name, tensor in through.items())


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused_in_one_line(policy: Path, tmp_path: Path) -> None:
    _run(policy, tmp_path / "run", 2)
    with pytest.raises(UserError, match=r"`lora.rank` of `actor` is 2, but the checkpoint has 4"):
        _run(policy, tmp_path / "run", 4, "last", rank=2)
    with pytest.raises(UserError, match=r"adapters of `actor` were trained on other weights") as refusal:
        _run(policy, tmp_path / "run", 4, "last", model="tiny")
    assert "\n" not in str(refusal.value)


class _ViewAlone(SFT):
    def configure_models(self) -> None:
        super().configure_models()
        self.reference = CausalLM(self.actor.model, lora=LoRA()).without_adapters()

    @node(role="reference")
    def ref_logprobs(self, batch: Batch) -> PerToken:
        return self.reference.logprobs(batch)

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch, ref_logprobs: PerToken) -> PerToken:
        return -self.actor.logprobs(batch)


def test_a_view_whose_model_no_node_uses_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`reference` is a model without its adapters, and no node uses the model"):
        fit(Fit(_ViewAlone(CausalLM(str(policy))), answers(LENGTHS, 4), tmp_path))


def test_a_run_does_not_start_from_an_adapter(policy: Path, tmp_path: Path) -> None:
    _run(policy, tmp_path / "run", 1)
    adapter = str(tmp_path / "run/model")
    with pytest.raises(UserError, match=r"which holds an adapter and no model; .* `rlflow export --model ") as refusal:
        fit(Fit(AdapterGRPO(adapter), sums(12, 3), tmp_path / "next"))
    assert "\n" not in str(refusal.value)
