"""A run that two ranks saved resumes with 1, 3 and 4: the same prompts, and losses that agree to rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlflow import CausalLM, Optimizer
from rlflow.algorithms import SFT
from rlflow.models.tiny import write_tiny_model
from tests import own_folder
from tests.controller.runs import ZERO2, ZERO3, Fit, StopsAfter, fit, grpo, sums
from tests.controller.runs import answers as recorded
from tests.faults.running import fit as fit_command
from tests.ranks import RankPool

pytestmark = pytest.mark.row("resume elsewhere")

STEPS, SAVED = 7, 2
LENGTHS = [3, 9, 5, 12, 7, 4, 10, 6, 8, 11, 2, 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("elsewhere") / "tiny", hidden_size=64, layers=1)


def run_of(model: Path, folder: Path, strategy: Any = ZERO2, **settings: Any) -> Fit:
    """SFT on recorded responses, whose rows say which they are."""
    module = SFT(CausalLM(str(model), optimizer=Optimizer("adamw", lr=1e-2), epochs=2, samples_per_update=2))
    given = {"max_steps": STEPS, "save_every_n_steps": 1, **settings}
    return Fit(module, recorded(LENGTHS, 4), folder, strategy, settings=given)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(1, ZERO2), (3, ZERO2), (4, ZERO3)], ids=["1", "3", "4"])
def test_losses_on_recorded_responses_are_those_of_as_many_ranks_as_before(
    ranks: int, strategy: Any, model: Path, tmp_path: Path, ranks2: RankPool, seen: Callable[[str], None]
) -> None:
    whole = ranks2.run(fit, run_of(model, tmp_path / "whole"))[0].steps
    ranks2.run(fit, run_of(model, tmp_path / "parts", callbacks=[StopsAfter(SAVED)]))
    with RankPool(ranks) as others:
        rest = others.run(fit, run_of(model, tmp_path / "parts", strategy, ckpt_path="last"))[0].steps
    losses = [(step["actor/loss"], expected["actor/loss"]) for step, expected in zip(rest, whole[SAVED:], strict=True)]
    apart = max(abs(loss - expected) for loss, expected in losses)
    assert len(losses) == 5
    assert len({loss for loss, _ in losses}) == 5  # it learns
    assert apart < 1e-5, losses
    seen(f"losses of 5 steps on {ranks} ranks within {apart:.0e}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_each_step_has_the_same_prompts(ranks: int, model: Path, tmp_path: Path, ranks2: RankPool) -> None:
    def run(folder: Path, **settings: Any) -> Fit:
        given = {"max_steps": 4, "save_every_n_steps": 1, **settings}
        return Fit(grpo(model, max_response_length=4), sums(12, 4), folder, ZERO2, settings=given)

    ranks2.run(fit, run(tmp_path / "whole"))
    ranks2.run(fit, run(tmp_path / "parts", callbacks=[StopsAfter(2)]))
    with RankPool(ranks) as others:
        others.run(fit, run(tmp_path / "parts", ckpt_path="last"))
    of_parts = prompts(tmp_path / "parts")
    assert sorted(of_parts) == [1, 2, 3, 4]
    assert of_parts == prompts(tmp_path / "whole")


def prompts(folder: Path) -> dict[int, list[str]]:
    """Prompts of each step's samples."""
    found: dict[int, list[str]] = {}
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["step"], []).append(sample["prompt"])
    return {step: sorted(each) for step, each in found.items()}


CHANGED = {
    "module.init_args.actor.optimizer.lr": (1e-6, "module.init_args.actor.init_args.optimizer"),
    "module.init_args.actor.temperature": (0.5, "module.init_args.actor.init_args.temperature"),
    "module.init_args.group_size": (4, "module.init_args.group_size"),
    "module.init_args.clip.high": (0.3, "module.init_args.clip.high"),
    "data.prompts_per_step": (2, "data.prompts_per_step"),
}
REFUSED = {"seed": 1, "module.init_args.actor.lora.rank": 2}


@pytest.mark.slow
def test_a_changed_setting_is_reported_in_a_line_or_refused(tmp_path: Path, seen: Callable[[str], None]) -> None:
    own_folder.make(tmp_path)
    saves = {"trainer.save_every_n_steps": 1}
    own_folder.write(tmp_path / "first.yaml", saves | {"trainer.max_steps": 1})
    assert fit_command(tmp_path, "--config", "first.yaml").code == 0
    changes = {key: value for key, (value, _) in CHANGED.items()}
    own_folder.write(tmp_path / "then.yaml", saves | {"trainer.ckpt_path": "last", **changes})
    ended = fit_command(tmp_path, "--config", "then.yaml")
    assert ended.code == 0, ended
    for _, key in CHANGED.values():
        lines = [line for line in ended.output.splitlines() if line.startswith(f"`{key}` is ")]
        assert len(lines) == 1, (key, ended.output)
        assert " and was " in lines[0]
    assert len([line for line in ended.output.splitlines() if " and was " in line]) == len(CHANGED)
    for key, value in REFUSED.items():
        own_folder.write(tmp_path / "refused.yaml", saves | {"trainer.ckpt_path": "last", key: value})
        config = yaml.safe_load((tmp_path / "refused.yaml").read_text())
        config["trainer"]["max_steps"] = 3
        (tmp_path / "refused.yaml").write_text(yaml.safe_dump(config))
        refused = fit_command(tmp_path, "--config", "refused.yaml")
        assert refused.code == 2, (key, refused)
        assert key.split(".")[-2 if "lora" in key else -1] in refused.last
    seen(f"{len(CHANGED)} changed settings told, {len(REFUSED)} refused")
