"""Runs on a mixture whose datasets sample at temperatures of their own, and from some tokens of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import (
    Batch,
    CausalLM,
    Environment,
    PerSample,
    PerToken,
    Rollout,
    RolloutWithTexts,
    Trainer,
    UserError,
    node,
)
from rlflow.algorithms import SFT, ScoreCentering
from rlflow.data import MixedDataset, Mixture, PromptData, SamplingSettings
from rlflow.data.mixture import settings_of
from rlflow.functional import KL
from rlflow.rollout import TransformersEngine
from rlflow.rollout.assignment import EngineSettings, Share
from rlflow.run.prepare import prepare, read_graph
from rlflow.settings import Place, Settings
from rlflow.simulate.hardware import PRESETS
from rlflow.simulate.simulation import Simulation
from rlflow.strategies import SingleProcess
from tests.algorithm_factory import made
from tests.controller.runs import FSDP, SGD, ZERO2, ZERO3, Fit, OddCharacters, RaggedGRPO, RaggedReMax, fit, grpo
from tests.controller.test_ranks import FLOAT32, difference
from tests.environments.games import CountDown
from tests.ranks import RankPool

OWN = {"cold": SamplingSettings(temperature=0.5), "few": SamplingSettings(top_p=0.9, top_k=5, temperature=1.5)}
Own = Mapping[str, SamplingSettings | None]


def mixture(own: Own = OWN, held_out: Own | None = None) -> PromptData:
    """Three prompts of each dataset in a step; `plain` has no settings of its own."""

    def mixed(of: Own) -> Mixture:
        rows = {name: [{"question": f"{i}+{name}="} for i in range(3)] for name in ("cold", "few", "plain")}
        return Mixture({name: MixedDataset(each, sampling=of.get(name)) for name, each in rows.items()})

    return PromptData(mixed(own), None if held_out is None else mixed(held_out), prompts_per_step=9)


def run_of(module: Any, folder: Path, strategy: Any = SingleProcess, own: Own = OWN, **settings: Any) -> Fit:
    return Fit(module, mixture(own), folder, strategy, settings={"max_steps": 2, "save_last": 2, **settings})


def updated(model: Path, **settings: Any) -> RaggedGRPO:
    """GRPO with a reference, whose step has two updates, so that it scores old log-probabilities."""
    return grpo(model, **{"kl": KL(0.1), "samples_per_update": 18, "optimizer": SGD, "temperature": 0.8, **settings})


class Looks(RaggedGRPO):
    """Records the dataset, the tokens of prompt and response, and the engine's logprobs of each sample."""

    @node
    def look(self, rollout: RolloutWithTexts) -> None:
        for row, source in enumerate(rollout.rows):
            length = int(rollout.lengths[row])
            kept = rollout.response_ids[row, :length], rollout.logprobs[row, :length].double()
            self.record.append((source["dataset"], rollout.prompt_ids.rows()[row], *kept))


def test_each_dataset_is_sampled_by_its_settings(policy: Path, tmp_path: Path) -> None:
    """The engine's logprobs are those of transformers' own forward, divided by the temperature of the dataset."""
    module = updated(policy)
    module.__class__ = Looks
    module.record = []
    fit(run_of(module, tmp_path, max_steps=1))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    assert {of for of, *_ in module.record} == {"cold", "few", "plain"}
    for of, prompt, response, logprobs in module.record:
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].detach()
        logits /= {"cold": 0.5, "few": 1.5, "plain": 0.8}[of]
        if of == "few":
            logits = logits.masked_fill(~OWN["few"].kept(logits), -torch.inf)
        expected = logits.log_softmax(1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)


def test_the_engine_the_trainer_and_the_reference_score_alike(policy: Path, tmp_path: Path) -> None:
    first, second = fit(run_of(updated(policy, samples_per_update=None), tmp_path)).steps
    assert first["sync/logprob_gap_max"] < 1e-4
    assert second["sync/logprob_gap_max"] < 1e-4
    assert first["actor/kl"] < 1e-6 < 1e-3 < second["actor/kl"]  # the reference has the weights of the start


class Forgetful(RaggedGRPO):
    """Scores its samples at the temperature of the policy."""

    @node(role="actor")
    def old_logprobs(self, rollout: Rollout) -> PerToken:
        assert set(rollout.temperature.tolist()) == {0.0, 0.5, 1.5}
        return super().old_logprobs(replace(rollout, temperature=torch.zeros_like(rollout.temperature)))


def test_a_run_that_scores_at_another_temperature_ends_in_its_first_step(policy: Path, tmp_path: Path) -> None:
    module = updated(policy)
    module.__class__ = Forgetful
    with pytest.raises(UserError, match=r"differ by .*, more than `trainer.logprob_gap_limit` = 0.001"):
        fit(run_of(module, tmp_path))


@pytest.mark.parametrize(
    ("strategy", "ranks", "place"),
    [
        (ZERO2, "ranks3", Place()),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                (FSDP, "ranks2", Place(tensor_parallel_size=2)),
                (ZERO3, "ranks2", Place(sequence_parallel_size=2)),
                (FSDP, "ranks4", Place(tensor_parallel_size=2, sequence_parallel_size=2)),
            ]
        ),
    ],
)
def test_the_weights_are_those_of_one_rank(
    strategy: Any, ranks: str, place: Place, policy: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    expected = fit(run_of(updated(policy), tmp_path / "1")).weights
    plain = fit(run_of(updated(policy), tmp_path / "plain", own={})).weights
    assert difference(plain, expected) > 1e-3
    for result in pool.run(fit, run_of(updated(policy), tmp_path / "n", strategy, placement={"actor": place})):
        assert difference(result.weights, expected) < FLOAT32


class Asks(RaggedGRPO):
    """Generates by the method of the model."""

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.generate(batch, self.group_size)
        return rollout


def test_a_model_s_own_method_scores_at_the_dataset_s_settings_too(policy: Path, tmp_path: Path) -> None:
    runs = []
    for kind in (RaggedGRPO, Asks):
        module = updated(policy)
        module.__class__ = kind
        runs.append(fit(run_of(module, tmp_path / kind.__name__, max_steps=1)).weights)
    assert difference(*runs) == 0


def test_score_centering_refuses_a_dataset_without_top_k(policy: Path, tmp_path: Path) -> None:
    module = made(ScoreCentering, policy, OddCharacters(), top_k=5, group_size=2, max_response_length=8)
    message = (
        "`sampling` of the dataset `cold` of `data.train` is set, and has no `top_k`, and ScoreCentering sums over"
    )
    with pytest.raises(UserError, match=message):
        fit(run_of(module, tmp_path, max_steps=1))


class Reads(RaggedGRPO):
    """Reads the engine's log-probabilities of the tokens that could be sampled."""

    @node
    def look(self, rollout: Rollout) -> PerSample:
        return rollout.sampler_logprobs.exp().sum((1, 2))


def test_some_responses_from_all_tokens_have_no_log_probabilities_of_some(policy: Path, tmp_path: Path) -> None:
    module = updated(policy, top_k=5)
    module.__class__ = Reads
    with pytest.raises(UserError, match="some responses were sampled from all tokens and others from some"):
        fit(run_of(module, tmp_path, max_steps=1))


class Continues(RaggedGRPO):
    """Continues responses; those to prompts that are made of responses were begun by the policy's settings."""

    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        begun = self.generate(batch)
        asked = begun.as_prompts(lambda text, row: [*range(70, 76)])
        rollout: Rollout = self.generate(self.actor.generate(asked, 2, max_new_tokens=2))
        return rollout


def test_a_response_is_continued_by_the_settings_it_was_begun_with(policy: Path, tmp_path: Path) -> None:
    module = updated(policy, kl=KL(0.0))
    module.__class__ = Continues
    (step,) = fit(run_of(module, tmp_path, max_steps=1)).steps
    assert step["sync/logprob_gap_max"] < 1e-4


class Taught(RaggedGRPO):
    """A frozen teacher generates, and what it sampled is trained on."""

    def configure_models(self) -> None:
        super().configure_models()
        self.teacher = CausalLM(self.actor.model, trainable=False)

    @node(generates="teacher")
    def rollout(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.teacher.generate(batch, self.group_size)
        return rollout

    @node
    def look(self, rollout: RolloutWithTexts) -> None:
        self.record += zip([row["dataset"] for row in rollout.rows], rollout.support.lengths.tolist(), strict=True)


def test_the_support_of_a_frozen_policys_samples_is_recorded_too(policy: Path, tmp_path: Path) -> None:
    module = updated(policy, kl=KL(0.0), samples_per_update=None)
    module.__class__ = Taught
    module.record = []
    fit(run_of(module, tmp_path, max_steps=1))
    assert {of for of, entries in module.record if entries} == {"few"}


def test_a_policy_that_neither_a_node_nor_validation_generates_with_has_no_engine(policy: Path, tmp_path: Path) -> None:
    module = updated(policy)
    module.__class__ = Taught
    for held_out, engines in ((None, ["teacher"]), ({}, ["teacher", "actor"])):
        asked = Settings(max_steps=1), SingleProcess(), EngineSettings(TransformersEngine()), tmp_path
        data = mixture(OWN, held_out)
        assert list(prepare(module, data, *asked).engines.own) == engines
        trainer, machine = Trainer(tmp_path, max_steps=1), replace(PRESETS["h100"], gpus_per_node=1)
        simulation = Simulation(module, read_graph(module), data, trainer, 1, "h100", machine, "strong", None, None)
        assert list(simulation.predicted.workload.engines) == engines
    shared = EngineSettings(TransformersEngine(), {"teacher": Share("actor")})
    run = prepare(module, mixture(OWN, None), Settings(max_steps=1), SingleProcess(), shared, tmp_path)
    assert list(run.engines.own) == ["actor"]  # whose engine it names
    placed = Settings(max_steps=1, placement={"actor.rollout": Place(0)})
    run = prepare(module, mixture(OWN, None), placed, SingleProcess(), EngineSettings(TransformersEngine()), tmp_path)
    assert list(run.engines.own) == ["teacher", "actor"]


def test_the_graph_says_that_models_read_the_columns(policy: Path) -> None:
    for own, read in ((OWN, True), ({}, False)):
        graph = read_graph(updated(policy), settings_of(mixture(own).train))
        assert ("temperature" in str(graph.fields["actor_loss", "rollout"])) is read


def test_a_node_that_asks_for_a_temperature_gets_it(policy: Path, tmp_path: Path) -> None:
    """The baseline of ReMax is the greedy response, whatever a dataset says: equal in a run without its settings."""
    found = []
    for name, own in (("own", OWN), ("none", {})):
        module = made(RaggedReMax, policy, OddCharacters(), max_response_length=12, optimizer=SGD)
        found.append(fit(run_of(module, tmp_path / name, own=own, max_steps=1)).steps[0])
    assert found[0]["greedy_reward/mean"] == found[1]["greedy_reward/mean"]
    assert found[0]["greedy/logprobs"] == pytest.approx(found[1]["greedy/logprobs"])
    assert found[0]["reward/mean"] != found[1]["reward/mean"]


class Warm(RaggedGRPO):
    @node(generates="actor")
    def rollout(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.generate(batch, n=self.group_size, temperature=0.7)
        return rollout


class WarmTeacher(Taught):
    """A node of two policies, with a temperature for the one that is not trained."""

    @node(generates=("actor", "teacher"))
    def rollout(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.teacher.generate(batch, n=self.group_size, temperature=0.7)
        return rollout


class Warmed(RaggedGRPO):
    """Continues what another node began at another temperature."""

    then: float | None = None

    @node(generates="actor")
    def trunk(self, batch: Batch) -> Rollout:
        rollout: Rollout = self.actor.generate(batch, temperature=0.7, max_new_tokens=2)
        return rollout

    @node(generates="actor")
    def rollout(self, trunk: Rollout) -> Rollout:
        begun = self.actor.generate(trunk, self.group_size, temperature=self.then, max_new_tokens=2)
        rollout: Rollout = self.actor.generate(begun)
        return rollout


@pytest.mark.parametrize(("own", "then"), [({}, None), ({}, 0.8), (OWN, None), (OWN, 0.8)])
def test_tokens_that_a_call_began_at_another_temperature_are_refused_too(
    own: Own, then: float | None, policy: Path, tmp_path: Path
) -> None:
    module = updated(policy)
    module.__class__, module.then = Warmed, then
    with pytest.raises(UserError, match="node `rollout` continues responses at another temperature"):
        fit(run_of(module, tmp_path, own=own, max_steps=1))


def test_rows_of_a_call_at_another_temperature_are_trained_at_it_or_refused(policy: Path, tmp_path: Path) -> None:
    module = updated(policy)
    module.__class__ = Warm
    (step,) = fit(run_of(module, tmp_path / "own", max_steps=1)).steps
    assert step["sync/logprob_gap"] < 1e-5
    refused = (
        r"node `rollout` generates at the temperature 0\.7 \(.*\), and `actor`, .* `actor\.temperature`, 0\.8; set"
    )
    with pytest.raises(UserError, match=refused):
        fit(run_of(module, tmp_path / "none", own={}, max_steps=1))
    module.__class__, module.record = WarmTeacher, []
    fit(run_of(module, tmp_path / "teacher", own={}, max_steps=1))


def test_validation_samples_each_dataset_by_its_settings(policy: Path, tmp_path: Path) -> None:
    """`few` from one token at each place, so that its samples are the greedy ones; `plain` as `val_sampling` says."""

    def validated(name: str, held_out: Own) -> dict[str, float]:
        settings = {"val_sampling": SamplingSettings(temperature=2.0), "val_samples": 4, "max_steps": 1}
        fit(Fit(grpo(policy), mixture({}, held_out), tmp_path / name, settings=settings))
        logged = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return next({name: value for name, value in step.items() if "val" in name} for step in logged)

    own = validated("own", {"few": SamplingSettings(top_k=1, temperature=3.0), "cold": SamplingSettings(temperature=5)})
    none = validated("none", {})
    assert own["val/few/reward"] == own["val_greedy/few/reward"] != none["val/few/reward"]
    assert own["val/plain/reward"] == none["val/plain/reward"] != none["val_greedy/plain/reward"]
    assert own["val/cold/reward"] != none["val/cold/reward"]
    for of in ("few", "cold", "plain"):
        assert own[f"val_greedy/{of}/reward"] == none[f"val_greedy/{of}/reward"]


def test_predictions_use_these_settings_and_are_made_again_if_one_changes(policy: Path, tmp_path: Path) -> None:
    def responses(own: Own) -> tuple[int, dict[str, set[str]]]:
        found = Trainer(tmp_path / "run", accelerator="cpu", val_samples=4).predict(grpo(policy), mixture(own))
        lines = [json.loads(line) for line in Path(found["path"]).read_text().splitlines()]
        made: dict[str, set[str]] = {}
        for line in lines:
            made.setdefault(line["prompt"], set()).add(line["response"])
        return found["found"], made

    _, plain = responses({})
    before, likeliest = responses({"few": SamplingSettings(top_k=1)})
    assert before == 0  # none of the first is kept
    for prompt, texts in likeliest.items():
        assert (len(texts) == 1) if "few" in prompt else texts == plain[prompt]
    assert any(len(plain[prompt]) > 1 for prompt in plain if "few" in prompt)


def test_a_measured_model_may_sample_from_tokens_that_training_could_not_store(policy: Path, tmp_path: Path) -> None:
    data = mixture({}, held_out={"few": SamplingSettings(top_p=0.9), "cold": SamplingSettings(temperature=0.1)})
    for name in ("validate", "test", "predict"):
        trainer = Trainer(tmp_path / name, accelerator="cpu")
        assert data.validation is not None
        getattr(trainer, name)(grpo(policy), data.validation)


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        (
            {"few": SamplingSettings(top_p=0.9)},
            {"top_k": 7},
            "^`top_p: 0.9` of the dataset `few` is set without `top_k`; .*, so set `top_k` too, such as 64",
        ),
        (OWN, {"environment": Environment(CountDown)}, "`top_p: 0.9, top_k: 5` of the dataset `few` is set and"),
        (
            {"cold": SamplingSettings(temperature=0.5)},
            {"environment": Environment(CountDown)},
            "`sampling` of the dataset `cold` of `data.train` is set, and `module.environment` is an environment",
        ),
    ],
)
def test_sampling_of_a_dataset_that_training_cannot_store_is_refused(
    own: Own, settings: dict[str, Any], message: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        fit(run_of(updated(policy, **settings), tmp_path, own=own))


def test_settings_that_nothing_samples_by_are_refused(policy: Path, tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "answer": "2"}] * 4
    own, plain = Mixture({"cold": MixedDataset(rows, sampling=OWN["cold"])}), Mixture({"cold": rows})
    for use, given in (("train", (own, None)), ("validation", (plain, own))):
        message = f"`sampling` of the dataset `cold` of `data.{use}` is set, and SFT samples no responses"
        with pytest.raises(UserError, match=message):
            fit(Fit(SFT(CausalLM(str(policy))), PromptData(*given, 2, response="answer"), tmp_path))


def test_a_run_of_one_dataset_sends_no_temperature(policy: Path, tmp_path: Path) -> None:
    for own, sent in ((OWN, ("support", "temperature")), ({"cold": OWN["cold"]}, ("temperature",)), ({}, ())):
        module = updated(policy)
        fit(run_of(module, tmp_path, own=own, max_steps=1))
        assert module.actor.model_inputs == module.reference.model_inputs == sent
