"""`rlflow replay`: the stored nodes of a run of two ranks give the same numbers in one process."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlflow.cli import main
from tests.own_folder import command
from tests.ranks import RankError, RankPool

MINE = """
import os

from rlflow import PerSample, node
from rlflow.types import Each, Grouped
from rlflow.algorithms import PPO
from rlflow.rewards import SampleReward


class Mine(PPO):
    @node
    def of_prompt(self, batch: Grouped, rewards: Each[PerSample]) -> PerSample:
        return rewards.mean()

    @node
    def picky(self, batch: Grouped, of_prompt: PerSample) -> PerSample:
        if "MENDED" not in os.environ and bool((batch.group == 11).any()):  # the last prompt of step 3
            raise ValueError("it does not like prompt 11")
        return 2 * of_prompt


class Digits(SampleReward):
    def score_sample(self, text, row):
        return sum(each.isdigit() for each in text) / 8
"""
CONFIG = {
    "module": {
        "class_path": "mine.Mine",
        "init_args": {
            "actor": {"model": "tiny", "optimizer": {"lr": 1e-3}},
            "critic": {"model": "tiny", "optimizer": {"lr": 1e-3}},
            "group_size": 4,
            "max_response_length": 8,
            "reward": {"class_path": "mine.Digits"},
        },
    },
    "data": {
        "train": {"class_path": "rlflow.data.JSONL", "init_args": {"path": "rows.jsonl"}},
        "prompts_per_step": 4,
        "prompt": "prompt",
    },
    "trainer": {
        "run_dir": "run",
        "max_steps": 4,
        "devices": 2,
        "accelerator": "cpu",
        "save_every_n_steps": 1,
        "dump_steps": [1, 2],
    },
    "strategy": {"class_path": "rlflow.strategies.DeepSpeedStrategy"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> Path:
    """Folder where a run of two ranks has kept steps 1 and 2, and has ended in step 3: a node raised on rank 1."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "mine.py").write_text(MINE)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(RankError, match="it does not like prompt 11"):
        ranks2.run(command, folder, "fit", "--config", "config.yaml", timeout_s=300)
    return folder


@pytest.fixture
def replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, str]]:
    """Runs `rlflow replay run` with options; the lines that it printed, by what they are of."""

    def run(*options: str) -> dict[str, str]:
        monkeypatch.chdir(folder)
        main(["replay", "run", *options])
        return dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)

    return run


WITHOUT_ROLE = ("rewards", "of_prompt", "estimates", "advantages", "picky")


def test_nodes_of_two_ranks_give_the_same_numbers_in_one_process(replayed: Callable[..., dict[str, str]]) -> None:
    said = replayed("--step", "2")
    assert said["weights"].startswith("run/checkpoint/step-00000001")
    for node in WITHOUT_ROLE:
        assert said[node].endswith("equal to the run's, to the bit"), said
    for node in ("rollout", "values", "actor_loss", "critic_loss"):
        assert apart(said[node]) <= 1e-6, said


def test_a_loss_that_was_no_number_in_the_run_is_a_difference(
    folder: Path, replayed: Callable[..., dict[str, str]]
) -> None:
    file = folder / "run" / "metrics.jsonl"
    before = file.read_text()
    lines = [json.loads(line) for line in before.splitlines()]
    try:
        file.write_text("".join(json.dumps(line | {"actor/loss": None}) + "\n" for line in lines))
        assert apart(replayed("--step", "1", "--node", "actor_loss")["actor_loss"]) == math.inf
    finally:
        file.write_text(before)


def apart(line: str) -> float:
    """The largest difference that a line reports."""
    return 0.0 if "to the bit" in line else float(line.split("at most ")[1].split()[0])


def test_the_first_step_needs_no_checkpoint_and_a_node_can_be_run_alone(
    replayed: Callable[..., dict[str, str]],
) -> None:
    assert set(replayed("--step", "1", "--node", "picky")) == {"picky"}
    said = replayed("--step", "1", "--node", "values")
    assert said["weights"] == "the models that the run began with"
    assert apart(said["values"]) <= 1e-6


def test_inputs_of_a_node_that_raised_are_stored_and_it_raises_again(
    folder: Path, replayed: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (folder / "run" / "inputs" / "step-00000003" / "picky.json").is_file()
    with pytest.raises(SystemExit) as ended:
        replayed("--step", "3")
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert re.search(r"picky raised on rank \d: it does not like prompt 11", printed.out)
    assert "it does not like prompt 11" in printed.err.splitlines()[-1]


def test_a_node_that_was_fixed_is_reported_as_not_raising(
    replayed: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MENDED", "1")
    assert replayed("--step", "3", "--node", "picky")["picky"].endswith("rows, it did not raise this time")


def test_inputs_that_were_not_written_are_reported_in_one_line(
    replayed: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, line in (
        (("--step", "9"), "run has no inputs of step 9; run again with `trainer.dump_steps: [9]`"),
        (("--step", "2", "--node", "valeus"), "`--node` is 'valeus', and of step 2 run has inputs of"),
        (("--step", "0"), "`--step` is 0; steps count from 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            replayed(*options)
        assert ended.value.code == 2
        assert line in capsys.readouterr().err.splitlines()[-1]


def test_a_debugger_stops_where_a_node_begins(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("next\np rewards.counts.tolist()\ncontinue\n"))
    main(["replay", "run", "--step", "2", "--node", "of_prompt", "--pdb"])
    printed = capsys.readouterr().out
    assert "mine.py" in printed
    assert "[4, 4, 4, 4]" in printed
    assert "of_prompt: 4 rows, equal to the run's, to the bit" in printed


SKIPPING = """
from rlflow.rewards import SampleReward


class Broken(SampleReward):
    def score_sample(self, text, row):
        raise KeyError("solution")
"""


def test_a_step_with_more_skipped_updates_than_end_a_run_can_be_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(SKIPPING)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    reward = {"class_path": "broken.Broken", "init_args": {"on_error": "drop"}}
    actor = {"model": "tiny", "optimizer": {"lr": 1e-3}, "samples_per_update": 4}
    of_module = {"actor": actor, "group_size": 4, "max_response_length": 8}
    module = {"class_path": "GRPO", "init_args": {**of_module, "reward": reward}}
    trainer = {**CONFIG["trainer"], "devices": 1, "max_steps": 1, "dump_steps": [1], "max_skipped": 10}
    config = {"module": module, "data": CONFIG["data"], "trainer": trainer}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    main(["fit", "--config", "config.yaml"])
    main(["replay", "run", "--step", "1", "--node", "actor_loss"])
    assert "actor_loss: " in capsys.readouterr().out
