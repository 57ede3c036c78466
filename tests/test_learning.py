"""The benchmark of learning: its task, its gates, and which runs it makes again."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from benchmarks.learning import noticed, runs, sums, table
from benchmarks.learning.chains import DIGITS, Chains
from benchmarks.learning.faults import FAULTS
from benchmarks.learning.gates import clip_fraction, divergence, explained_variance, gain
from benchmarks.learning.in_trl import by_step, settings
from benchmarks.learning.running import waves
from benchmarks.learning.runs import ROOT, Task
from benchmarks.learning.trainings import FAULTY, GATES, OURS, START

RUN = [  # its last tenth is one step
    {"step": 0, "val/accuracy": 0.25},
    {"step": 1, "actor/clip_fraction": 0.0, "actor/kl": 0.5, "critic/explained_variance": 0.9},
    {"step": 2, "actor/clip_fraction": 0.1, "actor/kl": 0.01, "critic/explained_variance": 0.6, "val/accuracy": 0.75},
]


class TestChains:
    def test_each_digit_is_the_one_before_plus_k(self) -> None:
        row = next(row for row in (Chains()[i] for i in range(90)) if row["prompt"] == "7:8")
        assert row["answer"].startswith("52963074185")
        assert len(row["answer"]) == DIGITS

    def test_without_slips_the_response_is_the_answer(self) -> None:
        rows = Chains(size=20, seed=3)
        assert all(row["response"] == row["answer"] for row in (rows[i] for i in range(20)))

    def test_slips_are_as_frequent_as_asked(self) -> None:
        rows = [Chains(size=300, seed=3, slip=0.01)[i] for i in range(300)]
        slips = chances = 0.0
        for row in rows:
            k, s = map(int, row["prompt"].split(":"))
            digits = [s, *map(int, row["response"])]
            slips += sum((b - a - k) % 10 != 0 for a, b in pairwise(digits))
            chances += DIGITS * 0.01 * k
        assert abs(slips - chances) < 4 * math.sqrt(chances)  # about 960 of 19,200


class TestGates:
    @pytest.mark.parametrize(
        ("gate", "fails"),
        [
            (gain(0.4), gain(0.5)),
            (explained_variance(0.5), explained_variance(0.7)),
            (divergence(0.001, 0.02), divergence(0.02, 0.6)),
        ],
    )
    def test_a_gate_passes_within_its_bound_and_fails_beyond(self, gate: object, fails: object) -> None:
        assert gate.passes(RUN)  # type: ignore[attr-defined]
        assert not fails.passes(RUN)  # type: ignore[attr-defined]

    def test_a_clip_that_never_binds_fails(self) -> None:
        assert clip_fraction().passes(RUN)
        assert not clip_fraction().passes([{**record, "actor/clip_fraction": 0.0} for record in RUN])

    def test_what_is_not_a_number_fails(self) -> None:
        assert not gain(0.2).passes([*RUN[:2], {"step": 2, "val/accuracy": math.nan}])

    def test_the_gates_that_a_seed_failed_are_named(self) -> None:
        gates = gain(0.2), explained_variance(0.5)
        unforeseen = [{**record, "critic/explained_variance": 0.1} for record in RUN]
        assert table.failed_gates(gates, [RUN, RUN]) == "none"
        assert table.failed_gates(gates, [RUN, unforeseen]) == "explained variance"

    def test_two_libraries_agree_within_two_standard_errors_and_a_bound(self) -> None:
        def reward(*values: float) -> list[list[dict[str, float]]]:
            return [[{"step": 1, "reward/mean": value}] for value in values]

        ours = reward(0.50, 0.52, 0.54)  # 0.52 with an error of 0.0115
        assert table.agree(ours, reward(0.53, 0.55, 0.57), "reward/mean", 0.05)  # 0.03 apart, 2 errors are 0.033
        assert not table.agree(ours, reward(0.54, 0.56, 0.58), "reward/mean", 0.05)
        assert not table.agree(ours, reward(0.40, 0.58, 0.76), "reward/mean", 0.05)  # within 2 errors, 0.06 apart


class TestRunning:
    def test_a_training_that_others_start_from_runs_first_and_once(self) -> None:
        first, *others = waves(GATES)
        assert first == [START]
        assert others == [[*GATES]]

    def test_a_run_is_finished_until_its_config_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runs, "ROOT", tmp_path)
        (tmp_path / "one.yaml").write_text("lr: 1")
        task = Task("a", "one.yaml")
        task.folder(0).mkdir(parents=True)
        assert not task.finished(0)
        task.marked(0).write_text(f"{task.mark(0)}\n{runs.code()}\n")
        assert task.finished(0)
        assert not task.of_other_code()
        task.marked(0).write_text(f"{task.mark(0)}\nof another day\n")
        assert task.finished(0)
        assert task.of_other_code()
        (tmp_path / "one.yaml").write_text("lr: 2")
        assert not task.finished(0)

    def test_seeds_differ_in_their_folders_and_commands(self) -> None:
        assert len({" ".join(OURS.command(seed)) for seed in OURS.seeds}) == len(OURS.seeds) == 3


class TestFaults:
    def test_every_fault_names_a_test_that_is_there(self) -> None:
        for fault in FAULTS.values():
            file, *test = fault.test.partition("[")[0].split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert all(name in text for name in test), fault.test

    def test_a_training_with_a_fault_has_the_gates_of_the_one_without(self) -> None:
        without = {task.config: gates for task, gates in GATES.items()}
        assert FAULTY
        assert all(gates == without[task.config] for task, gates in FAULTY.items())

    def test_tests_that_failed_by_an_assertion_are_read_from_the_summary(self) -> None:
        lines = (
            "FAILED tests/a.py::test_x[1-2] - assert 1",
            "FAILED tests/a.py::test_x[3] - AssertionError",
            "FAILED tests/b.py::y - TypeError",
        )
        assert noticed.failed_tests("\n".join([*lines, "1 passed"])) == ["tests/a.py::test_x"]


class TestInTRL:
    def test_the_settings_say_what_the_config_says(self) -> None:
        given = settings(yaml.safe_load((ROOT / OURS.config).read_text(encoding="utf-8")))
        assert given["steps_per_generation"] * given["per_device_train_batch_size"] == 128
        assert given["max_steps"] == 8 * yaml.safe_load((ROOT / OURS.config).read_text())["trainer"]["max_steps"]
        assert given["use_bias_correction_kl"]

    def test_a_step_is_the_mean_of_its_updates_and_the_validation_comes_last(self) -> None:
        logged = [{"loss": 0.0, "reward": 0.2, "kl": 0.1}, {"loss": 0.0, "kl": 0.3}]
        logged += [{"loss": 0.0, "reward": 0.6, "kl": 0.0}, {"loss": 0.0, "kl": 0.0}]
        first, second = by_step([*logged, {"eval_reward": 0.9}, {"train_loss": 0.0}], updates=2)
        assert first == {"step": 1, "reward/mean": 0.2, "actor/kl": pytest.approx(0.2)}
        assert (second["reward/mean"], second["val/accuracy"]) == (0.6, 0.9)


def test_what_was_not_trained_again_keeps_its_lines(tmp_path: Path) -> None:
    lines = sums.table([sums.Claim("kept"), sums.Claim("new")])
    before = [*lines[:2], "| `gone` | 1 |", "| `kept` | 300 | a |", "| `kept` | 300 | b |"]
    page = tmp_path / "page.md"
    page.write_text("\n".join(["above", "<!-- table: sums -->", *before, "<!-- end of sums -->", "below"]))
    table.write(page, "sums", lines)
    assert table.read(page, "sums")[2:] == [*before[3:], "| `new` | not trained yet | | | | | | |"]
