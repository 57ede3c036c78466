"""Runs whose environment is an agent: the loss is of the tokens that it received, on any ranks, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.functional import Aggregation
from rlflow.loggers.jsonl import read_samples
from tests.controller.runs import FSDP, Paired, fit
from tests.harness.agents import CRITIC
from tests.harness.runs import WithCritic, run
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.worker_processes import workers


def without_logprobs(rows: dict[tuple[int, ...], dict[str, Any]]) -> dict[tuple[int, ...], Any]:
    return {path: {name: x for name, x in row.items() if name != "logprobs"} for path, row in rows.items()}


@pytest.mark.parametrize("aggregation", slow_but(["episode-mean"], ["token-mean", "episode-mean"]))
def test_the_loss_is_of_what_an_agent_received_and_validation_counts_episodes(
    aggregation: Aggregation, policy: Path, tmp_path: Path
) -> None:
    """In float64, one row at a time; with one update a step the ratio is 1, and w is pi / mu of the engine."""
    made = run(policy, tmp_path / "run", "branches", held_out=3, val_check_interval=1)
    made.module.loss_aggregation = aggregation
    result = fit(made)
    rows = result.record[0]
    assert len(rows) == 2 * 2 * 6
    model, terms = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64), defaultdict(list)
    for path, row in rows.items():
        episodes = [other["reward"] for of, other in rows.items() if of[0] == path[0] and of[1] % 6 == 0]
        group = torch.tensor(episodes, dtype=torch.float64)
        advantage = 0.0 if group.std() == 0 else (row["reward"] - group.mean()) / (group.std() + 1e-6)
        ids = torch.tensor([[*row["prompt"], *row["response"]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0]
        weights = (logprobs - torch.tensor(row["logprobs"], dtype=torch.float64)).exp()
        terms[path[0], path[1] // 6].append(-(advantage * weights)[torch.tensor(row["mask"])])
    metrics, of_episodes = result.steps[-1], [torch.cat(each) for each in terms.values()]
    means = torch.stack([each.mean() for each in of_episodes])
    expected = means.mean() if aggregation == "episode-mean" else torch.cat(of_episodes).mean()
    assert metrics["actor/loss"] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    # The agent's reward is how many tokens it received.
    assert metrics["rollout/tokens"] == sum(sum(row["mask"]) for row in rows.values())
    assert metrics["rollout/tokens"] == sum(row["reward"] for row in rows.values()) / 6
    assert metrics["rollout/episodes"] == 4
    assert 12 < result.summary["reward_after"] <= 12 * 6
    (first, *_) = read_samples(tmp_path / "run")
    assert "row 1 of 6 of the episode" in first["messages"][-1]["ended"]
    assert not workers()


@pytest.mark.slow
def test_turns_have_the_advantage_of_their_subtree(policy: Path, tmp_path: Path) -> None:
    """TreeRL's, by hand; without importance weights and with one update a step the loss is that of the advantages."""
    given = {"advantages_at": "subtree", "normalize_std": False, "importance": None}
    result = fit(run(policy, tmp_path / "run", "forks_twice", given=given))
    rows = result.record[0]
    leaves = {path: row["reward"] for path, row in rows.items()}
    groups = {path[0]: [leaves[of] for of in leaves if of[0] == path[0]] for path in leaves}
    loss = []
    for (prompt, number), row in rows.items():
        root, first = sum(groups[prompt]) / 6, number // 3 * 3
        left, right, alone = (leaves[prompt, first + i] for i in range(3))
        values = ([(left + right) / 2, left, left], [(left + right) / 2, right], [alone])[number % 3]
        before = [root, *values]
        trained = [turn for turn, counts in zip(row["turn"], row["mask"], strict=True) if counts]
        loss += [-((values[turn] - root) + (values[turn] - before[turn])) for turn in trained]
    assert len({*loss}) > 4
    assert result.steps[0]["actor/loss"] == pytest.approx(sum(loss) / len(loss), rel=1e-5)


def test_an_agent_is_not_cut_off(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`module.environment` is a harness and `trainer.partial_rollout` is set"):
        fit(run(policy, tmp_path / "run", "talks", partial_rollout=8))


@pytest.mark.slow
def test_an_agent_s_two_models_are_trained_on_what_each_of_them_said(policy: Path, tmp_path: Path) -> None:
    made = run(policy, tmp_path / "run", "asks_a_critic", kind=WithCritic, other_models=[CRITIC], max_steps=2)
    result = fit(made)
    for step, rows in zip(result.steps, result.record, strict=True):
        assert step["rollout/tokens"] == sum(row["reward"] for row in rows.values())  # which the agent counts
        assert step["of_critic/tokens"] > 0
        assert step["critic/grad_norm"] > 0
    for rollout in made.module.of_critic_record:
        assert all(each[0]["content"].startswith("judge ") and len(each) == 2 for each in rollout.messages)
    assert not workers()


def _fit_and_leave_no_worker(made: Any) -> Any:
    result = fit(made)
    assert not workers()
    return result


@pytest.mark.slow
def test_two_ranks_and_a_shared_engine_give_the_rows_of_one(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    alone = fit(run(policy, tmp_path / "alone", "branches"))
    on_two = ranks2.run(_fit_and_leave_no_worker, replace(run(policy, tmp_path / "two", "branches"), strategy=FSDP))
    shared = ranks2.run(
        _fit_and_leave_no_worker,
        replace(run(policy, tmp_path / "one", "branches"), strategy=FSDP, engine=Paired()),
    )
    expected = without_logprobs(alone.record[0])
    assert without_logprobs(on_two[0].record[0] | on_two[1].record[0]) == expected
    for rank in shared:
        assert without_logprobs(rank.record[0]) == expected
    assert on_two[0].steps[0]["actor/loss"] == pytest.approx(alone.steps[0]["actor/loss"], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_was_killed_in_an_episode_continues_as_one_that_was_not(policy: Path, tmp_path: Path) -> None:
    def start(folder: Path, seen: Path) -> int:
        variables = {**os.environ, "RLFLOW_TEST_KILLS": str(seen), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.harness.runs", str(folder), str(policy)]
        return subprocess.run(
            command, env=variables, cwd=Path(__file__).parents[2], timeout=300, check=False
        ).returncode

    never = tmp_path / "never"
    never.write_text("x" * 6)  # no episode is the sixth
    assert start(tmp_path / "whole", never) == 0
    assert start(tmp_path / "killed", tmp_path / "once") == -signal.SIGKILL
    assert start(tmp_path / "killed", tmp_path / "once") == 0
    whole, killed = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("whole", "killed"))
    assert len(whole) == 3
    assert 1 <= len(killed) < 3  # the step of the sixth episode is run again, and those after it
    for of_killed, of_whole in zip(killed, whole[-len(killed) :], strict=True):
        assert [row | {"logprobs": []} for row in of_killed] == [row | {"logprobs": []} for row in of_whole]
        for one, other in zip(of_killed, of_whole, strict=True):  # which episodes meet in a batch changes the last bits
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
