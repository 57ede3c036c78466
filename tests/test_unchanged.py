"""The proof that a change of the code changed no number: its runs, its comparisons, and the code that it imports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.unchanged import execution, starts
from benchmarks.unchanged.cases import VLLM, Case, apart, cases_of, divisor
from benchmarks.unchanged.comparison import compared
from benchmarks.unchanged.execution import python
from benchmarks.unchanged.record import Values, values_of
from benchmarks.unchanged.renamed import renamed, unused, with_defaults
from benchmarks.unchanged.revisions import ROOT, Revision, digest, entry_point, placed
from benchmarks.unchanged.running import Runs
from benchmarks.unchanged.shortened import shortened
from benchmarks.unchanged.table import row, summary, table

CONFIGS = ROOT / "configs"
CASE = Case("grpo", ranks=2, divisor=4)
VALUES: Values = {"step 1": {"actor/loss": 0.1, "time/step": 3.0}, "weights of model": {"head": "ab"}}


def read(config: str) -> Any:
    return yaml.safe_load((CONFIGS / f"{config}.yaml").read_text(encoding="utf-8"))


class TestCases:
    def test_every_config_is_run_at_1_and_2_ranks_or_at_those_of_its_placement(self) -> None:
        ranks: dict[str, set[int]] = {}
        for case in cases_of(CONFIGS):
            ranks.setdefault(case.config, set()).add(case.ranks)
        stems = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")}
        assert ranks.keys() == {stem for stem in stems if not stem.startswith("tests/")}  # which are for `rlflow test`
        named = {name for names in apart(CONFIGS).values() for name in names}
        assert {name for name, found in ranks.items() if found != {1, 2}} <= named
        assert ranks["ppo_apart"] == {4}

    def test_records_have_names_of_their_own(self) -> None:
        cases = cases_of(CONFIGS)
        assert len({case.name for case in cases}) == len(cases)

    def test_a_case_with_fewer_ranks_and_no_vllm_has_less_effort(self) -> None:
        one, four, served = CASE, replace(CASE, ranks=4), replace(CASE, ranks=1, engine=VLLM)
        assert sorted([served, four, one], key=lambda case: case.effort) == [one, four, served]

    @pytest.mark.parametrize(
        ("prompts", "group_size", "by"),
        # at least 4 prompts and 64 samples: 8 of 8, 64 of 1, 4 of 16 and of 32; 12 of 8 by halves of 96
        [(32, 8, 4), (128, 1, 2), (1024, 16, 256), (16, 4, 1), (16, 32, 4), (96, 8, 8)],
    )
    def test_a_step_is_cut_to_what_a_proof_needs(self, prompts: int, group_size: int, by: int) -> None:
        assert divisor(prompts, group_size) == by


class TestShortened:
    def test_the_number_of_updates_of_a_step_stays(self) -> None:
        short = shortened(read("grpo_math_8gpu"), Case("grpo_math_8gpu", 2, divisor=16), Path("run"))
        assert short["data"]["prompts_per_step"] == 128 / 16
        assert short["module"]["init_args"]["actor"]["samples_per_update"] == 512 / 16

    @pytest.mark.parametrize(("written", "made"), [(8, 8), (64, 64), (65, 32), (3072, 32)])
    def test_long_responses_are_cut(self, written: int, made: int) -> None:
        settings = {"module": {"max_response_length": written}, "data": {"prompts_per_step": 32}, "trainer": {}}
        assert shortened(settings, CASE, Path("run"))["module"] == {"max_response_length": made}

    def test_keys_are_found_wherever_a_revision_has_them(self) -> None:
        settings = {
            "module": {
                "init_args": {
                    "critic": {"actor_start_step": 6},
                    "parts": [{"samples_per_update": 128}],
                    "start_step": 0,
                }
            },
            "data": {"prompts_per_step": 32},
            "trainer": {},
        }
        module = shortened(settings, CASE, Path("run"))["module"]["init_args"]
        assert module == {"critic": {"actor_start_step": 1}, "parts": [{"samples_per_update": 32}], "start_step": 0}

    def test_a_config_of_one_process_has_a_strategy_at_two_ranks_and_its_own_at_one(self) -> None:
        of_two, of_one = (shortened(read("grpo"), replace(CASE, ranks=ranks), Path("run")) for ranks in (2, 1))
        assert of_two["strategy"]["class_path"].endswith("DeepSpeedStrategy")
        assert of_one["strategy"] == read("grpo")["strategy"]

    def test_a_config_for_gpus_runs_on_a_cpu_without_a_network(self) -> None:
        short = shortened(read("grpo_gsm8k_1gpu"), Case("grpo_gsm8k_1gpu", 1, divisor=8), Path("run"))
        assert short["module"]["init_args"]["actor"]["model"] == "tiny"
        assert short["trainer"]["accelerator"] == "cpu"
        assert "logger" not in short
        assert short["strategy"] == read("grpo_gsm8k_1gpu")["strategy"]


class TestComparison:
    def test_equal_values_have_no_difference_and_are_counted(self) -> None:
        assert compared(VALUES, VALUES, allowed=()) == (2, [])  # of three, a time is left out

    def test_the_last_bit_of_a_number_is_a_difference_with_step_name_and_both_numbers(self) -> None:
        now = VALUES | {"step 1": {"actor/loss": math.nextafter(0.1, 1.0)}}
        ((difference,),) = compared(VALUES, now, allowed=())[1:]
        assert str(difference) == (
            "step 1, actor/loss: 0.1 (0x1.999999999999ap-4) before, 0.10000000000000002 (0x1.999999999999bp-4) now"
        )

    @pytest.mark.parametrize(("before", "now"), [(0.0, -0.0), (None, 0.0), ("1.0", 1.0)])
    def test_values_of_another_sign_or_type_are_not_equal(self, before: Any, now: Any) -> None:
        assert len(compared({"step 1": {"x": before}}, {"step 1": {"x": now}}, allowed=())[1]) == 1

    def test_a_value_that_one_side_lacks_is_a_difference_unless_it_is_allowed(self) -> None:
        more = VALUES | {"step 1": {"actor/loss": 0.1, "actor/kl": 0.0}}
        for sides in ((VALUES, more), (more, VALUES)):
            assert [difference.name for difference in compared(*sides, allowed=())[1]] == ["actor/kl"]
            assert compared(*sides, allowed=("actor/kl",)) == (2, [])

    def test_a_metric_that_may_be_missing_may_not_differ(self) -> None:
        now = VALUES | {"step 1": {"actor/loss": 0.2}}
        assert len(compared(VALUES, now, allowed=("actor/loss",))[1]) == 1

    def test_a_step_that_is_not_there_is_a_difference(self) -> None:
        assert len(compared(VALUES, {"step 1": VALUES["step 1"]}, allowed=())[1]) == 1


class TestRenamed:
    NAMES = {"actor/loss": "actor/policy_loss"}  # noqa: RUF012
    NOW: Values = {"step 1": {"actor/policy_loss": 0.1, "time/step": 3.0}, "weights of model": {"head": "ab"}}  # noqa: RUF012

    def test_a_renamed_metric_is_compared_under_its_new_name(self) -> None:
        assert compared(renamed(VALUES, self.NAMES), self.NOW, allowed=()) == (2, [])
        other = self.NOW | {"step 1": {"actor/policy_loss": 0.2}}
        assert [each.name for each in compared(renamed(VALUES, self.NAMES), other, ())[1]] == ["actor/policy_loss"]

    def test_a_renaming_that_one_side_does_not_have_is_listed(self) -> None:
        assert unused([VALUES], [self.NOW], self.NAMES) == []
        assert unused([VALUES], [VALUES], self.NAMES) == ["actor/loss -> actor/policy_loss"]
        assert unused([self.NOW], [self.NOW], self.NAMES) == ["actor/loss -> actor/policy_loss"]

    def test_a_changed_default_is_written_out_where_a_config_does_not_set_it(self) -> None:
        defaults = {"data.prompt": "question"}
        assert with_defaults({"data": {"shuffle": False}}, defaults) == {
            "data": {"shuffle": False, "prompt": "question"}
        }
        assert with_defaults({"data": {"prompt": "text"}}, defaults) == {"data": {"prompt": "text"}}
        of_class = with_defaults({"strategy": "fsdp"}, {"strategy.init_args.hsdp_shard_size": 2})
        assert of_class == {"strategy": {"class_path": "fsdp", "init_args": {"hsdp_shard_size": 2}}}

    def test_a_proof_writes_the_new_names_of_keys_and_classes(self) -> None:
        settings = {"module": {"longest_response": 65}, "data": {"prompts_per_step": 32}, "trainer": {}, "rollout": "x"}
        names = {"max_response_length": "longest_response", CASE.engine: "rlflow.rollout.Engine"}
        short = shortened(settings, CASE, Path("run"), names)
        assert short["module"] == {"longest_response": 32}
        assert short["rollout"] == {"class_path": "rlflow.rollout.Engine"}


class TestRecord:
    def write(self, folder: Path, weight: float) -> Values:
        (folder / "model-critic").mkdir(parents=True)
        save_file({"head": torch.tensor([1.0, weight])}, folder / "model-critic" / "model.safetensors")
        (folder / "metrics.jsonl").write_text('{"step": 0, "val/accuracy": 0.5}\n{"step": 1, "actor/loss": 0.1}\n')
        rows = [{"step": 1, "prompt": "1+1", "parts": {"right": 1.0}}, {"step": 1, "prompt": "2+1", "parts": {}}]
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in rows))
        return values_of(folder)

    def test_a_record_has_metrics_samples_and_weights(self, tmp_path: Path) -> None:
        found = self.write(tmp_path, 2.0)
        assert found.pop("weights of model-critic").keys() == {"head"}
        assert found == {
            "step 0": {"val/accuracy": 0.5},
            "step 1": {"actor/loss": 0.1},
            "samples of step 1": {"0.prompt": "1+1", "0.parts.right": 1.0, "1.prompt": "2+1"},
        }

    def test_one_bit_of_a_weight_is_seen(self, tmp_path: Path) -> None:
        one, same, other = (
            self.write(tmp_path / name, weight)
            for name, weight in {"one": 1.0, "same": 1.0, "other": 1.0 + 2**-23}.items()
        )
        assert one == same
        assert [difference.name for difference in compared(one, other, allowed=())[1]] == ["head"]


class TestTable:
    def test_a_run_that_is_not_there_is_not_equal(self) -> None:
        missing = row(CASE, VALUES, None, allowed=())
        assert not missing.equal
        assert "missing: now" in table([missing])[-1]

    def test_a_difference_is_shown_and_counted(self) -> None:
        rows = [
            row(CASE, VALUES, VALUES, allowed=()),
            row(CASE, VALUES, VALUES | {"weights of model": {"head": "cd"}}, allowed=()),
        ]
        assert [each.equal for each in rows] == [True, False]
        assert table(rows)[2:] == [
            "| grpo | 2 | transformers | 2 | equal |",
            "| grpo | 2 | transformers | 2 | 1 differ; first weights of model, head: 'ab' before, 'cd' now |",
        ]
        assert summary(rows) == "1 of 2 runs of 1 configs are equal in 4 values; 1 differ, 0 are missing"


class TestRevisions:
    FILES = {  # noqa: RUF012
        "setup.py": b"entry_points={'console_scripts': ['rlflow = rlflow.command:run']}",
        "rlflow/__init__.py": b"",
        "rlflow/command.py": b"import rlflow.algorithms\ndef run(): print(rlflow.algorithms.NAME)",
        "algorithms/__init__.py": b"NAME = 'of the revision'",
        "configs/grpo.yaml": (CONFIGS / "grpo.yaml").read_bytes(),
    }

    def test_a_revision_imports_its_own_code_though_another_is_installed(self, tmp_path: Path) -> None:
        revision = placed("base", self.FILES, tmp_path)
        log = tmp_path / "printed.log"
        assert python(revision, [str(revision.command)], tmp_path, log) == 0
        assert log.read_text() == "of the revision\n"
        imported = log.with_suffix(".imported").read_text().split()
        assert imported == [
            str(revision.code / "rlflow" / "__init__.py"),
            str(revision.code / "rlflow" / "algorithms" / "__init__.py"),
        ]

    def test_processes_that_a_run_starts_import_the_revision_s_code_too(self, tmp_path: Path) -> None:
        log = tmp_path / "printed.log"
        code = "import rlflow.algorithms; print(rlflow.algorithms.NAME)"
        assert python(placed("base", self.FILES, tmp_path), ["-c", code], tmp_path, log) == 0
        assert log.read_text() == "of the revision\n"

    def test_a_process_that_takes_too_long_has_failed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(execution, "LIMIT_S", 0.1)
        revision = placed("base", self.FILES, tmp_path)
        assert python(revision, ["-c", "import time; time.sleep(9)"], tmp_path, tmp_path / "printed.log") != 0

    def test_the_digest_is_of_names_and_contents(self) -> None:
        changed = self.FILES | {"algorithms/__init__.py": b"NAME = 'of another code'"}  # as long as it was
        assert len(changed["algorithms/__init__.py"]) == len(self.FILES["algorithms/__init__.py"])
        moved = {name.replace("command", "commands"): content for name, content in self.FILES.items()}
        assert len({digest(self.FILES), digest(changed), digest(moved)}) == 3
        assert digest(dict(reversed(self.FILES.items()))) == digest(self.FILES)

    def test_the_entry_point_is_the_one_of_setup_py(self) -> None:
        module, function = entry_point((ROOT / "setup.py").read_text(encoding="utf-8"))
        assert callable(getattr(import_module(module), function))

    def test_a_record_that_was_made_otherwise_is_not_taken(self, tmp_path: Path) -> None:
        runs = Runs(placed("base", self.FILES, tmp_path), self.starts(tmp_path))
        runs.folder.mkdir()
        path = runs.folder / f"{CASE.name}.json"
        path.write_text(json.dumps({"mark": runs.mark(CASE), "values": VALUES}))
        assert runs.values(CASE) == VALUES
        path.write_text(json.dumps({"mark": runs.mark(replace(CASE, divisor=2)), "values": VALUES}))
        assert runs.values(CASE) is None

    def test_records_from_other_models_lie_in_another_folder(self, tmp_path: Path) -> None:
        revision = Revision("base", tmp_path)
        before = Runs(revision, self.starts(tmp_path)).folder
        (tmp_path / "starts" / "learn" / "sft" / "model" / "model.safetensors").write_bytes(b"other")
        assert Runs(revision, tmp_path / "starts").folder != before

    def starts(self, folder: Path) -> Path:
        for name in starts.MODELS:
            model = folder / "starts" / name / "model"
            model.mkdir(parents=True)
            (model / "model.safetensors").write_bytes(name.encode())
        (folder / "starts" / starts.PROBLEMS).mkdir()
        (folder / "starts" / starts.PROBLEMS / "problems.jsonl").write_text("")
        return folder / "starts"
