"""Roles on ranks of their own: the same numbers as together, and generation that runs ahead with known weights."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow import CausalLM, LoRA, Optimizer, PerSample, RLModule, Rollout, ValueModel, node
from rlflow.algorithms import PPO, OnPolicyDistillation
from rlflow.callbacks import Callback
from rlflow.functional import KL
from rlflow.rewards import RewardInput, Scores
from rlflow.rollout.engine import RankInfo, Sampling
from rlflow.rollout.sampling import sampling_seed
from rlflow.rollout.transformers import TransformersEngine
from rlflow.run.pretrained import load_tokenizer, stop_tokens
from tests.controller.runs import (
    SGD,
    ZERO2,
    ZERO3,
    Fit,
    OddCharacters,
    RaggedGRPO,
    RaggedReMax,
    Result,
    StopsAfter,
    failing_fit,
    fit,
    grpo,
    sums,
)
from tests.ranks import RankPool

STEPS = 4
APART = {"rollout": [0], "actor": [1], "reference": [1]}
SETTINGS: dict[str, Any] = {"max_steps": STEPS}


class RecordingGRPO(RaggedGRPO):
    """Records, on the ranks that generate, each step's responses, and what the engine said of them."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.record: list[dict[str, Tensor]] = []

    def rollout(self, batch: Any) -> Rollout:
        made = super().rollout(batch)
        self.record.append(
            {
                "prompts": made.prompt_ids.values,
                "prompt_lengths": made.prompt_ids.lengths,
                "responses": made.response_ids,
                "lengths": made.lengths,
                "logprobs": made.logprobs,
                "version": made.version,
                "group": made.group,
            }
        )
        return made


class Weights(Callback):
    """Keeps the actor's weights before the first step and after each."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._keep(trainer)

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self._keep(trainer)

    def _keep(self, trainer: Any) -> None:
        if trainer.strategy.holds("actor"):
            buckets = trainer.strategy.weights("actor", 2**20)
            self.kept.append({name: weight.clone() for bucket in buckets for name, weight in bucket})


class Delays(Callback):
    """Waits a little before each task of the plan, on each rank for another time."""

    def __init__(self) -> None:
        self._random = random.Random(dist.get_rank())

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        time.sleep(self._random.random() * 0.05)


def run(model: Path, folder: Path, strategy: Any = ZERO2, **settings: Any) -> Fit:
    """GRPO with a reference, with these settings of the trainer."""
    made = RecordingGRPO(
        CausalLM(str(model), optimizer=SGD), OddCharacters(), group_size=4, max_response_length=12, kl=KL(0.1)
    )
    return Fit(made, sums(16, 4), folder, strategy, settings={**SETTINGS, **settings})


def fit_with_weights(given: Fit) -> tuple[Result, list[dict[str, Tensor]]]:
    kept = Weights()
    given.settings["callbacks"] = [*given.settings.get("callbacks", []), kept]
    return fit(given), kept.kept


def fit_with_delays(given: Fit) -> Result:
    given.settings["callbacks"] = [*given.settings.get("callbacks", []), Delays()]
    return fit(given)


def numbers(step: dict[str, float]) -> dict[str, float]:
    """The metrics of a step that depend on neither clocks nor where roles run."""
    clocks = ("time/", "exchange/", "balance/")
    return {name: value for name, value in step.items() if not name.startswith(clocks)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=atol) for name in a)


@pytest.fixture(scope="module")
def together(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks1: RankPool) -> Result:
    """On one rank."""
    (result,) = ranks1.run(fit, run(policy, tmp_path_factory.mktemp("together")))
    return result


@pytest.mark.parametrize("strategy", [pytest.param(ZERO2, marks=pytest.mark.slow), ZERO3])
def test_generation_on_another_rank_gives_the_bits_of_one_rank(
    policy: Path, tmp_path: Path, ranks1: RankPool, ranks2: RankPool, strategy: Any
) -> None:
    (together,) = ranks1.run(fit, run(policy, tmp_path / "together", strategy))
    generates, trains = ranks2.run(fit, run(policy, tmp_path / "apart", strategy, placement=APART))
    assert [numbers(step) for step in trains.steps] == [numbers(step) for step in together.steps]
    assert generates.steps == trains.steps
    assert same(trains.weights, together.weights)
    assert generates.weights == {}, "the engine's rank has no trained role"


def test_roles_on_three_ranks_train_what_one_rank_trains(
    policy: Path, tmp_path: Path, ranks3: RankPool, together: Result
) -> None:
    placement = {"rollout": "0-1", "actor": "1-2", "reference": 0}
    results = ranks3.run(fit, run(policy, tmp_path, placement=placement))
    assert close(results[2].weights, together.weights, atol=1e-5)
    for step, expected in zip(results[0].steps, together.steps, strict=True):
        assert step["reward/mean"] == expected["reward/mean"]
        assert step["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)


@pytest.fixture(scope="module")
def ahead(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool
) -> tuple[Result, Result, list[dict[str, Tensor]]]:
    """One step ahead: what the rank that generates knows, and the one that trains; the weights after each step."""
    folder = tmp_path_factory.mktemp("ahead")
    (generates, _), (trains, weights) = ranks2.run(
        fit_with_weights, run(policy, folder, placement=APART, max_staleness=1)
    )
    return generates, trains, weights


def test_each_step_is_generated_with_the_weights_of_one_step_before(
    policy: Path, ahead: tuple[Result, Result, list[dict[str, Tensor]]]
) -> None:
    generates, _, weights = ahead
    assert [made["version"].unique().tolist() for made in generates.record] == [[0], [0], [1], [2]]
    engine = TransformersEngine()
    engine.setup(str(policy), RankInfo(torch.float32, torch.device("cpu")))
    for step, made in enumerate(generates.record):
        version = max(0, step - 1)
        engine.update_weights([list(weights[version].items())], version)
        prompts = [list(prompt) for prompt in torch.split(made["prompts"], made["prompt_lengths"].tolist())]
        sampling = Sampling(12, 1.0, stop_tokens(policy, load_tokenizer(policy), RaggedGRPO.stop_token_ids))
        seeds = [sampling_seed(0, step, "rollout", (int(group),), row % 4) for row, group in enumerate(made["group"])]
        completions = engine.generate([[int(t) for t in prompt] for prompt in prompts], seeds, sampling, version)
        lengths = made["lengths"].tolist()
        expected = [tuple(row[:n]) for row, n in zip(made["responses"].tolist(), lengths, strict=True)]
        assert [one.token_ids for one in completions] == expected
        said = [row[:n] for row, n in zip(made["logprobs"].tolist(), lengths, strict=True)]
        for one, logprobs in zip(completions, said, strict=True):
            assert one.logprobs == pytest.approx(logprobs, abs=1e-6)


def test_engine_and_trainer_are_compared_at_each_sync(ahead: tuple[Result, Result, list[dict[str, Tensor]]]) -> None:
    steps = ahead[1].steps
    assert all(step["sync/logprob_gap"] < 1e-5 for step in steps if "sync/logprob_gap" in step)
    assert [step["rollout/staleness"] for step in steps] == [0.0, 1.0, 1.0, 1.0]


def test_random_delays_change_nothing(
    policy: Path, tmp_path: Path, ranks2: RankPool, ahead: tuple[Result, Result, list[dict[str, Tensor]]]
) -> None:
    _, trains = ranks2.run(fit_with_delays, run(policy, tmp_path, placement=APART, max_staleness=1))
    assert [numbers(step) for step in trains.steps] == [numbers(step) for step in ahead[1].steps]
    assert same(trains.weights, ahead[1].weights)


class Passes(OddCharacters):
    """Also a point for each pass over the dataset."""

    def score(self, responses: RewardInput) -> Scores:
        scores = super().score(responses)
        return replace(scores, total=[each + responses.state.epoch for each in scores.total])


def reference_alone(model: Path) -> RLModule:
    """A reference on a rank that neither generates nor trains, which gets rows before the ranks that train.

    Its rewards, from which the divergence is taken off, are made where it trains.
    """
    module = grpo(model, optimizer=SGD, kl=KL(0.1, in_reward=True))
    module.reward = Passes()
    return module


def goes_on(folder: Path, made: Callable[[], RLModule], ranks: RankPool, **settings: Any) -> None:
    """A run that is stopped after two steps and continued is the run that was not, in metrics and weights."""

    def given(part: str, stops_after: int, **more: Any) -> Fit:
        every = {"save_every_n_steps": 1, "max_steps": 5, "callbacks": [StopsAfter(stops_after)], **settings, **more}
        return Fit(made(), sums(16, 4), folder / part, ZERO2, settings=every)

    whole = ranks.run(fit, given("whole", 0))[-1]
    ranks.run(fit, given("parts", 2))
    rest = ranks.run(fit, given("parts", 0, ckpt_path="last"))[-1]
    for step, expected in zip(rest.steps, whole.steps[2:], strict=True):
        assert numbers(step) == numbers(expected)
    assert same(rest.weights, whole.weights)


@pytest.mark.slow
def test_a_reference_on_a_rank_of_its_own_resumes_to_the_bit(policy: Path, tmp_path: Path, ranks3: RankPool) -> None:
    placement = {"rollout": 0, "reference": 1, "actor": 2}
    goes_on(tmp_path, lambda: reference_alone(policy), ranks3, placement=placement, max_staleness=1)


@pytest.mark.slow
def test_rows_of_prompts_and_of_their_responses_resume_to_the_bit(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    goes_on(tmp_path, lambda: remax(policy), ranks2, placement={"rollout": 0, "actor": 1}, max_staleness=2)


def test_a_run_whose_steps_overlap_is_not_made_longer_or_given_other_draws(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    given = {"placement": APART, "max_staleness": 1, "save_every_n_steps": 1}
    ranks2.run(fit, run(policy, tmp_path, **{**given, "max_steps": 2}))
    longer = run(policy, tmp_path, **{**given, "max_steps": 4, "ckpt_path": "last"})
    for result in ranks2.run(failing_fit, longer):
        assert "has no rows of step 3, which a run with `trainer.max_staleness` 1 has generated by then" in result.error
    saved = str(tmp_path / "checkpoint/step-00000001")
    together = run(policy, tmp_path / "together", **{**given, "max_staleness": 0, "ckpt_path": saved, "max_steps": 2})
    for result in ranks2.run(failing_fit, together):
        assert "has rows of step 2, which would be generated and counted once more" in result.error
    fewer = run(policy, tmp_path / "fewer", **{**given, "ckpt_path": saved, "max_steps": 2})
    for result in ranks2.run(failing_fit, replace(fewer, data=sums(16, 2))):
        assert "has rows of later steps of draws of 4 prompts, whose ids other prompts would get" in result.error


class FilteredGRPO(RaggedGRPO):
    """Groups whose samples are not worth the same."""

    @node(type="filter")
    def useful(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        spread = rewards.view(-1, 4).std(dim=1, keepdim=True) > 1.0
        return spread.expand(-1, 4).flatten()


def test_a_filter_that_runs_ahead_keeps_what_it_keeps_on_one_rank(
    policy: Path, tmp_path: Path, ranks1: RankPool, ranks3: RankPool
) -> None:
    def given(folder: str, **settings: Any) -> Fit:
        # Weights that do not change make the steps of both runs the same.
        frozen = Optimizer("sgd", lr=0.0)
        made = FilteredGRPO(
            CausalLM(str(policy), optimizer=frozen), OddCharacters(), group_size=4, max_response_length=12
        )
        return Fit(made, sums(32, 4), tmp_path / folder, ZERO2, settings={**SETTINGS, **settings})

    (one,) = ranks1.run(fit, given("one"))
    apart = {"rollout": "0-1", "actor": 2}
    results = ranks3.run(fit_with_delays, given("apart", placement=apart, max_staleness=1))
    for step, expected in zip(results[0].steps, one.steps, strict=True):
        for name in ("reward/mean", "filter/kept", "filter/draws", "filter/surplus"):
            assert step[name] == pytest.approx(expected[name], abs=1e-6), name
        assert step["actor/loss"] == pytest.approx(expected["actor/loss"], abs=1e-5)
    assert max(step["filter/draws"] for step in one.steps) > 1, "some steps take several draws"


@dataclass(eq=False)
class RaggedPPO(PPO):
    """PPO with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))


def test_ppo_with_critic_and_reference_on_other_ranks_trains_as_on_one(
    policy: Path, tmp_path: Path, ranks1: RankPool, ranks4: RankPool
) -> None:
    def given(folder: str, **settings: Any) -> Fit:
        actor = CausalLM(str(policy), optimizer=SGD)
        critic = ValueModel(str(policy), optimizer=Optimizer("sgd", lr=1e-3))
        made = RaggedPPO(actor, OddCharacters(), 2, 12, kl=KL(0.1), critic=critic)
        return Fit(made, sums(16, 4), tmp_path / folder, ZERO2, settings={**SETTINGS, **settings})

    (one,) = ranks1.run(fit, given("one"))
    placement = {"rollout": 0, "actor": [1, 2], "critic": [2, 3], "reference": 3}
    results = ranks4.run(fit, given("apart", placement=placement))
    for step, expected in zip(results[3].steps, one.steps, strict=True):
        for name in ("reward/mean", "actor/loss", "critic/loss"):
            assert step[name] == pytest.approx(expected[name], abs=1e-5), name
    assert close(results[1].weights, one.weights, atol=1e-5)


@dataclass(eq=False)
class RaggedDistillation(OnPolicyDistillation):
    """On-policy distillation with responses of many lengths."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))


def remax(model: Path) -> RLModule:
    """Two rollout nodes; one of them keeps the prompts' rows."""
    return RaggedReMax(CausalLM(str(model), optimizer=SGD), OddCharacters(), max_response_length=12)


def distillation(model: Path) -> RLModule:
    """A third role."""
    return RaggedDistillation(CausalLM(str(model), optimizer=SGD), teacher=CausalLM(str(model)), max_response_length=12)


def adapters(model: Path) -> RLModule:
    """A reference that is a view of the actor."""
    lora = LoRA(rank=2)
    return grpo(model, optimizer=SGD, kl_coef=0.1, lora=lora)


def restrained(model: Path) -> RLModule:
    """Rewards of texts, which stay where they were made, and of logprobs, which are made where the actor trains."""
    return grpo(model, optimizer=SGD, kl_coef=0.1, kl_in_reward=True, kl_kind="k1")


@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [
        (restrained, {"rollout": [0], "actor": [1, 2], "reference": [2]}),
        pytest.param(remax, {"rollout": [0, 1], "actor": [1, 2]}, marks=pytest.mark.slow),
        pytest.param(distillation, {"rollout": 2, "actor": [0, 1], "teacher": 1}, marks=pytest.mark.slow),
        (adapters, {"rollout": [0, 1], "actor": 2}),
    ],
)
def test_other_graphs_train_apart_what_they_train_together(
    policy: Path, tmp_path: Path, ranks1: RankPool, ranks3: RankPool, algorithm: Any, placement: dict[str, Any]
) -> None:
    def given(folder: str, **settings: Any) -> Fit:
        return Fit(algorithm(policy), sums(16, 4), tmp_path / folder, ZERO2, settings={"max_steps": 2, **settings})

    (one,) = ranks1.run(fit, given("one"))
    results = ranks3.run(fit, given("apart", placement=placement))
    for step, expected in zip(results[0].steps, one.steps, strict=True):
        same_names = numbers(expected).keys() - {"sync/logprob_gap", "sync/logprob_gap_max"}
        assert {name: step[name] for name in same_names} == pytest.approx(
            {name: expected[name] for name in same_names}, abs=1e-4
        )
    trained = next(result.weights for result in results if result.weights)
    assert close(trained, one.weights, atol=1e-5)
