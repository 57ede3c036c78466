"""Long responses are cut off and continued with later weights: the version of each token is known, no group is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import Batch, PerSample, PerToken, Rollout, node
from rlflow.rollout.transformers import TransformersEngine
from rlflow.strategies import SingleProcess
from rlflow.types import Grouped, Sampled, WithDatasetRows
from tests.algorithm_factory import made
from tests.checkpoint.test_checkpoint import StopAfter
from tests.checkpoint_files import write_state
from tests.controller.runs import SGD, ZERO2, Fit, OddCharacters, RaggedGRPO, Result, failing_fit, fit, sums
from tests.controller.test_filled_steps import is_hard
from tests.controller.test_ranks import FLOAT32, difference
from tests.controller.test_separate_roles import fit_with_delays, fit_with_weights, same
from tests.ranks import RankPool
from tests.slow import slow_but

NEEDED, STEPS, GROUP, LONGEST, PART = 4, 4, 3, 12, 4


class Seen(Sampled, Grouped, WithDatasetRows, Protocol):
    finished: PerSample
    versions: PerToken


class Recording(RaggedGRPO):
    """Records what later nodes see of each step: its samples over all ranks."""

    record: list[dict[str, Tensor]]

    @node
    def seen(self, rollout: Seen, batch: WithDatasetRows) -> PerSample:
        assert [row["question"] for row in batch.rows] == [row["question"] for row in rollout.rows]
        columns = {"group": rollout.group, "version": rollout.version, "lengths": rollout.lengths}
        columns |= {"finished": rollout.finished.long()}
        for name in ("response_ids", "logprobs", "versions"):
            column = torch.zeros(len(rollout.group), LONGEST, dtype=getattr(rollout, name).dtype)
            column[:, : getattr(rollout, name).shape[1]] = getattr(rollout, name)
            columns |= {f"{name}/{place}": column[:, place] for place in range(LONGEST)}
        prompts = [row.tolist() for row in rollout.prompt_ids.rows()]
        columns |= {f"prompt/{place}": torch.tensor([row[place] for row in prompts]) for place in range(4)}
        self.record.append({name: self.all_rows(column).clone() for name, column in columns.items()})
        return rollout.lengths


def wide(step: dict[str, Tensor], name: str) -> Tensor:
    """A column of responses or prompts, `[N, T]`."""
    return torch.stack([step[key] for key in step if key.startswith(f"{name}/")], dim=1)


def module(policy: Path, kind: type[Recording] = Recording, **settings: Any) -> Recording:
    given = {"optimizer": SGD, "group_size": GROUP, "max_response_length": LONGEST, "samples_per_update": 2 * GROUP}
    recording = made(kind, policy, OddCharacters(), **{**given, **settings})
    recording.record = []
    return recording


def given(policy: Path, folder: Path, strategy: Any = ZERO2, kind: type[Recording] = Recording, **settings: Any) -> Fit:
    settings = {"max_steps": STEPS, "partial_rollout": PART, **settings}
    return Fit(module(policy, kind), sums(10, NEEDED), folder, strategy, settings=settings)


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Tensor]]]:
    """On one process; with the weights before the first step and after each."""
    return fit_with_weights(given(policy, tmp_path_factory.mktemp("alone"), SingleProcess))


def trained(result: Result) -> list[list[int]]:
    """The groups of each step, ascending."""
    return [sorted(set(step["group"].tolist())) for step in result.record]


def check_versions(result: Result, weights: list[dict[str, Tensor]], policy: Path) -> None:
    """Each token has the logprob that the weights of its version give it, in float64, and no other's."""
    models = []
    for version in weights:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        model.load_state_dict({name: weight.double() for name, weight in version.items()}, strict=False)
        models.append(model.eval())
    apart = 0.0
    for step in result.record:
        prompts, responses, said = wide(step, "prompt"), wide(step, "response_ids"), wide(step, "logprobs")
        versions = wide(step, "versions")
        ids = torch.cat([prompts, responses], dim=1)
        with torch.no_grad():
            each = torch.stack([model(ids).logits[:, 3:-1].log_softmax(-1) for model in models])
        each = each.gather(-1, responses.expand(len(models), -1, -1)[..., None])[..., 0]  # [versions, N, T]
        within = torch.arange(LONGEST)[None, :] < step["lengths"][:, None]
        true = each.gather(0, versions[None])[0]
        assert torch.allclose(true[within], said[within].double(), atol=2e-5)
        apart = max(apart, float((each - said).abs().amax(dim=0)[within].max()))
    assert apart > 1e-2, "other weights say the same"


def test_every_token_is_of_the_version_that_is_recorded_for_it(
    policy: Path, alone: tuple[Result, list[dict[str, Tensor]]]
) -> None:
    check_versions(*alone, policy)


def test_responses_grow_part_by_part_with_the_weights_of_their_step(
    alone: tuple[Result, list[dict[str, Tensor]]],
) -> None:
    continued = 0
    for number, step in enumerate(alone[0].record):
        columns = (wide(step, "versions"), step["lengths"], step["version"], step["finished"])
        for versions, length, oldest, finished in zip(*(column.tolist() for column in columns), strict=True):
            assert finished or length == LONGEST
            assert versions[:length] == sorted(versions[:length])
            assert oldest == versions[0]
            assert max(versions[:length]) <= number
            changes = [place for place in range(1, length) if versions[place] != versions[place - 1]]
            assert all(place % PART == 0 for place in changes)
            continued += bool(changes)
    assert continued > 10


def test_every_group_is_trained_once_or_waits(alone: tuple[Result, list[dict[str, Tensor]]]) -> None:
    result = alone[0]
    assert [len(groups) for groups in trained(result)] == [NEEDED] * STEPS
    groups = [group for step in trained(result) for group in step]
    assert len(groups) == len(set(groups))
    last = result.steps[-1]
    waiting = last["rollout/surplus"] + last["rollout/unfinished_groups"]
    assert last["rollout/draws_total"] * NEEDED == len(groups) + waiting
    assert sum(step["rollout/draws"] for step in result.steps) == last["rollout/draws_total"]


def test_engine_and_trainer_are_compared_at_each_sync(alone: tuple[Result, list[dict[str, Tensor]]]) -> None:
    for step in alone[0].steps:
        assert 0 < step["sync/logprob_gap"] < 1e-5


def test_metrics_are_of_the_responses_that_ended(alone: tuple[Result, list[dict[str, Tensor]]]) -> None:
    steps, record = alone[0].steps, alone[0].record
    for number, (step, seen) in enumerate(zip(steps, record, strict=True)):
        assert step["rollout/staleness"] == pytest.approx(float((number - seen["version"]).double().mean()))
    assert steps[-1]["rollout/surplus"] == 0, "all that ended was trained"
    rows = [step["rollout/tokens"] / step["rollout/length"] for step in steps]  # that ended in each step
    newest = [wide(seen, "versions").gather(1, seen["lengths"][:, None] - 1)[:, 0] for seen in record]
    continued = sum(int((new > seen["version"]).sum()) for new, seen in zip(newest, record, strict=True))
    assert sum(rows) == pytest.approx(STEPS * NEEDED * GROUP)
    assert sum(step["rollout/tokens"] for step in steps) == sum(int(seen["lengths"].sum()) for seen in record)
    for name, expected in {
        "rollout/truncated": sum(int((seen["finished"] == 0).sum()) for seen in record),
        "rollout/continued": continued,
    }.items():
        assert sum(step[name] * count for step, count in zip(steps, rows, strict=True)) == pytest.approx(expected)


@pytest.mark.parametrize("part", [100])
def test_parts_as_long_as_a_response_change_nothing(part: int, policy: Path, tmp_path: Path) -> None:
    whole = fit(given(policy, tmp_path / "whole", SingleProcess, partial_rollout=None))
    parts = fit(given(policy, tmp_path / "parts", SingleProcess, partial_rollout=part))
    assert same(parts.weights, whole.weights)
    for step, expected in zip(parts.record, whole.record, strict=True):
        assert all(torch.equal(step[name], expected[name]) for name in expected)


@pytest.mark.parametrize("part", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_need_not_divide_the_longest_response(part: int, policy: Path, tmp_path: Path) -> None:
    result, weights = fit_with_weights(given(policy, tmp_path, SingleProcess, partial_rollout=part))
    check_versions(result, weights, policy)
    assert max(int(step["lengths"].max()) for step in result.record) == LONGEST


@pytest.fixture(scope="module")
def on_two(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> list[Result]:
    return ranks2.run(fit, given(policy, tmp_path_factory.mktemp("on_two"), callbacks=[StopAfter(STEPS)]))


@pytest.mark.parametrize("ranks", slow_but((2,), (2, 4)))
def test_another_number_of_ranks_trains_on_the_same_groups(
    ranks: int,
    alone: tuple[Result, list[dict[str, Tensor]]],
    policy: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    on_four = ranks == 4 and request.getfixturevalue("ranks4").run(fit, given(policy, tmp_path), timeout_s=200)
    for result in on_four or request.getfixturevalue("on_two"):
        assert trained(result) == trained(alone[0])
        for step, expected in zip(result.record, alone[0].record, strict=True):
            for name in ("versions", "response_ids"):
                assert torch.equal(wide(step, name), wide(expected, name))
        assert difference(result.weights, alone[0].weights) < FLOAT32


@pytest.fixture(scope="module")
def stopped(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> Fit:
    """The run of two ranks, stopped while responses are unfinished."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    settings = {"save_every_n_steps": 1}
    (first, _) = ranks2.run(fit, given(policy, folder, **settings, callbacks=[StopAfter(2)]))
    assert first.steps[-1]["rollout/unfinished_groups"] > 0
    checkpoint = folder / "checkpoint/step-00000002"
    return given(policy, folder, **settings, callbacks=[StopAfter(STEPS)], ckpt_path=str(checkpoint))


def test_another_number_of_ranks_resumes_what_is_in_progress(
    stopped: Fit, alone: tuple[Result, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    result = fit(replace(stopped, folder=tmp_path, strategy=SingleProcess))
    assert trained(result) == trained(alone[0])[2:]
    assert difference(result.weights, alone[0].weights) < FLOAT32


class Shared(TransformersEngine):
    """A rollout of two ranks that both generate the same."""

    tensor_parallel_size = 2


@pytest.mark.parametrize("ranks", slow_but((2,), (2, 4)))
def test_ranks_that_share_an_engine_hold_back_the_same(
    ranks: int,
    alone: tuple[Result, list[dict[str, Tensor]]],
    policy: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    run = replace(given(policy, tmp_path), engine=Shared())
    for result in request.getfixturevalue(f"ranks{ranks}").run(fit, run):
        assert trained(result) == trained(alone[0])
        assert difference(result.weights, alone[0].weights) < FLOAT32
        for step, expected in zip(result.steps, alone[0].steps, strict=True):
            for name in ("rollout/tokens", "rollout/continued", "rollout/unfinished_groups", "rollout/staleness"):
                assert step[name] == pytest.approx(expected[name]), name


class Masking(Recording):
    """Records, of each sample, how many tokens are trained on."""

    @node
    def seen(self, rollout: Rollout, batch: Batch) -> PerSample:
        self.record.append({"lengths": rollout.lengths, "finished": rollout.finished, "mask": rollout.loss_mask})
        return rollout.lengths


def test_responses_cut_at_the_longest_are_left_out_and_parts_are_not(policy: Path, tmp_path: Path) -> None:
    run = given(policy, tmp_path, SingleProcess, Masking)
    run.module.mask_truncated = True
    for step in fit(run).record:
        assert torch.equal(step["mask"].sum(dim=1), step["lengths"] * step["finished"])
        assert bool((step["lengths"] * step["finished"] > PART).any())


class EndedRows(WithDatasetRows, Protocol):
    finished: PerSample
    lengths: PerSample


class Picky(Recording):
    """Leaves out easy prompts."""

    @node(type="filter")
    def useful(self, rollout: EndedRows, rewards: PerSample) -> PerSample:
        assert bool((rollout.finished | (rollout.lengths == LONGEST)).all()), "a filter sees what has ended"
        return torch.tensor([is_hard(row) for row in rollout.rows], dtype=torch.bool)


def test_a_filter_chooses_among_what_has_ended(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    result, weights = fit_with_weights(given(policy, tmp_path / "one", SingleProcess, Picky))
    check_versions(result, weights, policy)
    assert [len(groups) for groups in trained(result)] == [NEEDED] * STEPS
    assert min(step["filter/kept"] for step in result.steps if "filter/kept" in step) < 1
    for other in ranks2.run(fit, given(policy, tmp_path / "two", kind=Picky)):
        assert trained(other) == trained(result)
        assert difference(other.weights, result.weights) < FLOAT32


class KeepsAll(Recording):
    @node(type="filter")
    def useful(self, rollout: Rollout, rewards: PerSample) -> PerSample:
        return rewards.isfinite()


def test_a_filter_is_asked_as_often_as_there_are_groups_to_ask_about(policy: Path, tmp_path: Path) -> None:
    run = given(policy, tmp_path, SingleProcess, KeepsAll, partial_rollout=1)
    run.module.max_draws = 1
    result = fit(run)
    assert [len(groups) for groups in trained(result)] == [NEEDED] * STEPS
    assert result.steps[0]["filter/draws"] > 1


APART: dict[str, Any] = {"placement": {"rollout": "0-1", "actor": "1-2"}}
AHEAD: dict[str, Any] = {"placement": {"rollout": 0, "actor": "1-2"}, "max_staleness": 1}


def test_roles_apart_train_on_the_same_groups(
    alone: tuple[Result, list[dict[str, Tensor]]], policy: Path, tmp_path: Path, ranks3: RankPool
) -> None:
    results = ranks3.run(fit_with_delays, given(policy, tmp_path, **APART))
    assert trained(results[0]) == trained(alone[0])
    assert difference(results[2].weights, alone[0].weights) < FLOAT32


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Recording, Picky])
def test_steps_that_overlap_have_responses_of_the_weights_that_they_say(
    kind: type[Recording], policy: Path, tmp_path: Path, ranks3: RankPool
) -> None:
    whole = ranks3.run(fit_with_weights, given(policy, tmp_path, **AHEAD, kind=kind))
    check_versions(whole[0][0], whole[2][1], policy)


class Twice(Recording):
    def rollout(self, batch: Batch) -> Rollout:
        super().rollout(batch)
        return super().rollout(batch)


def test_a_node_that_samples_twice_is_refused(policy: Path, tmp_path: Path) -> None:
    result = failing_fit(given(policy, tmp_path, SingleProcess, Twice))
    assert result.error == (
        "node `rollout` samples twice, and `trainer.partial_rollout` continues the responses of one `generate`;"
        " sample once in it, or leave `trainer.partial_rollout` out"
    )


def test_a_run_of_partial_rollouts_is_not_resumed_with_whole_responses(stopped: Fit, tmp_path: Path) -> None:
    settings = {**stopped.settings, "partial_rollout": None}
    result = failing_fit(replace(stopped, folder=tmp_path, strategy=SingleProcess, settings=settings))
    assert "has unfinished responses, which would be lost" in result.error


def test_unfinished_responses_are_not_resumed_with_draws_of_another_size(stopped: Fit, tmp_path: Path) -> None:
    fewer = replace(stopped, folder=tmp_path, strategy=SingleProcess, data=sums(10, NEEDED - 1))
    assert f"has unfinished responses of draws of {NEEDED} prompts, whose ids other" in failing_fit(fewer).error


def test_groups_that_have_ended_are_not_lost_either(policy: Path, tmp_path: Path) -> None:
    settings = {"save_every_n_steps": 1, "callbacks": [StopAfter(1)]}
    result = fit(given(policy, tmp_path, SingleProcess, **settings))
    assert result.steps[0]["rollout/surplus"] > 0
    checkpoint = tmp_path / "checkpoint/step-00000001"
    (checkpoint / "unfinished.json").unlink()
    stored = json.loads((checkpoint / "state.json").read_text())
    del stored["files"]["unfinished.json"], stored["sha256"]
    write_state(checkpoint, stored)
    rest = failing_fit(given(policy, tmp_path, SingleProcess, partial_rollout=None, ckpt_path="last"))
    assert "has groups that wait for the next step, which would be lost" in rest.error
