"""Runs whose policy samples from some tokens: the scores are over these tokens, on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow import CausalLM, Environment, PerToken, Rollout, UserError, node
from rlflow.algorithms import GRPO
from rlflow.functional import KL
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.transformers import TransformersEngine
from rlflow.run.prepare import configure
from rlflow.settings import Place
from rlflow.strategies import SingleProcess
from rlflow.values.response_settings import SamplingSettings
from rlflow.values.truncation import END
from tests.controller.runs import FSDP, SGD, ZERO2, ZERO3, Fit, OddCharacters, RaggedGRPO, fit, grpo, sums
from tests.controller.test_ranks import FLOAT32, difference
from tests.environments.games import CountDown
from tests.ranks import RankPool

TRUNCATED = {"top_p": 0.9, "top_k": 40, "temperature": 0.8}


def truncated(model: Path, **settings: Any) -> RaggedGRPO:
    """GRPO with a reference, whose step has two updates, so that it scores old log-probabilities."""
    return grpo(model, kl=KL(0.1), samples_per_update=6, optimizer=SGD, **{**TRUNCATED, **settings})


def run_of(module: Any, folder: Path, strategy: Any = SingleProcess, **settings: Any) -> Fit:
    return Fit(module, sums(9, 3, held_out=3), folder, strategy, settings={"max_steps": 2, "save_last": 2, **settings})


def test_every_language_model_is_sent_the_tokens_that_a_policy_could_sample() -> None:
    for settings, sent in ((TRUNCATED, ("support",)), ({}, ()), ({**TRUNCATED, "trainable": False}, ())):
        module = GRPO(CausalLM("tiny", **settings), OddCharacters(), kl=KL(0.1))  # type: ignore[arg-type]
        configure(module)
        assert module.actor.model_inputs == module.reference.model_inputs == sent


def test_the_engine_and_the_trainer_score_over_the_same_tokens(policy: Path, tmp_path: Path) -> None:
    for step in fit(run_of(truncated(policy), tmp_path)).steps:
        assert step["sync/logprob_gap_max"] < 1e-4


class Forgetful(RaggedGRPO):
    """Scores its samples over the whole vocabulary."""

    @node(role="actor")
    def old_logprobs(self, rollout: Rollout) -> PerToken:
        assert int((rollout.support.values == END).sum()) == int(rollout.lengths.sum())
        none = replace(rollout.support, values=rollout.support.values[:0], lengths=0 * rollout.lengths)
        return super().old_logprobs(replace(rollout, support=none))


def test_a_run_without_the_replay_ends_in_its_first_step(policy: Path, tmp_path: Path) -> None:
    module = truncated(policy)
    module.__class__ = Forgetful
    with pytest.raises(UserError, match=r"differ by .*, more than `trainer.logprob_gap_limit` = 0.001"):
        fit(run_of(module, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "place"),
    [
        (ZERO2, "ranks3", Place()),
        (FSDP, "ranks2", Place()),
        (FSDP, "ranks2", Place(tensor_parallel_size=2)),
        (ZERO3, "ranks2", Place(sequence_parallel_size=2)),
        (FSDP, "ranks4", Place(tensor_parallel_size=2, sequence_parallel_size=2)),
    ],
)
def test_the_weights_are_those_of_one_rank(
    strategy: Any, ranks: str, place: Place, policy: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    expected = fit(run_of(truncated(policy), tmp_path / "1")).weights
    plain = fit(run_of(truncated(policy, top_p=1.0, top_k=None), tmp_path / "plain")).weights
    assert difference(plain, expected) > 1e-3
    for result in pool.run(fit, run_of(truncated(policy), tmp_path / "n", strategy, placement={"actor": place})):
        assert difference(result.weights, expected) < FLOAT32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": None}, "`top_p: 0.9` of `actor` is set without `top_k`; .*, so set `top_k` too, such as 64"),
        (
            {"environment": Environment(CountDown)},
            "`top_p: 0.9, top_k: 40` of `actor` is set and `module.environment` too",
        ),
    ],
)
def test_sampling_whose_tokens_cannot_be_stored_is_refused(
    settings: dict[str, Any], message: str, policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        fit(run_of(truncated(policy, **settings), tmp_path))


def test_an_engine_that_does_not_report_the_tokens_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`rollout` is Silent, which does not report the tokens that they leave"):
        fit(replace(run_of(truncated(policy), tmp_path), engine=Silent()))


class Silent(TransformersEngine):
    return_support = RolloutEngine.return_support


def test_validation_samples_as_it_likes(policy: Path, tmp_path: Path) -> None:
    """From one token at each place, so that each sample is the greedy one; the policy samples from all tokens."""
    likeliest = {"val_sampling": SamplingSettings(top_k=1, temperature=3.0), "val_samples": 4, "val_check_interval": 1}
    fit(run_of(grpo(policy), tmp_path, **likeliest))
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validated = [step for step in logged if "val/reward" in step]
    assert len(validated) == 3
    for step in validated:
        assert step["val/length"] == step["val_greedy/length"]
        assert step["val/reward"] == step["val_greedy/reward"]
