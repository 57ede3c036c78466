"""`rlflow test` and `rlflow predict`: a model's responses to a dataset, measured and written."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from rlflow import CausalLM, RewardModel, Trainer, UserError
from rlflow.algorithms import GAIL, GRPO, PPO, SFT
from rlflow.callbacks import EarlyStopping
from rlflow.commands.fit import read_fit
from rlflow.data import Mixture, PromptData
from rlflow.functional import bootstrap_interval
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import resolve_model, write_tiny_model
from rlflow.state import Curriculum
from tests.slow import slow_but

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(6)]
CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "tests").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "tiny"
    return write_tiny_model(folder, hidden_size=32, intermediate_size=48, layers=1, max_position=64)


def has_a_letter(response: str) -> float:
    return float(any(each.isalpha() for each in response))


def grpo(model: Path) -> GRPO:
    return GRPO(CausalLM(str(model)), reward=has_a_letter, max_response_length=3)


def trainer(folder: Path, **settings: Any) -> Trainer:
    return Trainer(folder / "run", accelerator="cpu", **settings)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_interval_has_the_quantiles_of_the_binomial_distribution() -> None:
    # Of 100 prompts with 50 right, a resample has Binomial(100, 1/2) right ones: 2.5 % are below 40, 97.5 % up to 60.
    low, high = bootstrap_interval(torch.tensor([0.0, 1.0] * 50))
    assert (low, high) == pytest.approx((0.40, 0.60))
    # Right or wrong by prompt, not by response: 4 alike responses to a prompt say no more than one.
    assert bootstrap_interval(torch.ones(10)) == (1.0, 1.0)


def test_the_results_are_those_of_the_responses_that_are_left(model: Path, tmp_path: Path) -> None:
    source = Mixture({"a": ROWS[:4], "b": ROWS[4:]})
    of_fit = EarlyStopping("val/loss")  # of a `validation_step`, which `test` does not compute
    results = trainer(tmp_path, val_samples=4, callbacks=of_fit).test(grpo(model), PromptData(source, source))
    assert json.loads((tmp_path / "run-test" / "test.json").read_text()) == results
    left = lines(tmp_path / "run-test" / "responses.jsonl")
    for dataset, prefix in (("", ""), ("a", "a/"), ("b", "b/")):
        of = [each for each in left if dataset in ("", each["dataset"])]
        sampled: dict[int, list[float]] = {}
        for each in of:
            assert each["reward"] == has_a_letter(each["response"])
            if not each["greedy"]:
                sampled.setdefault(each["row"], []).append(each["reward"])
        shares = [sum(rewards) / 4 for rewards in sampled.values()]
        pairs = [max(pair) for rewards in sampled.values() for pair in combinations(rewards, 2)]
        greedy = [each["reward"] for each in of if each["greedy"]]
        assert results[f"{prefix}avg@4"]["mean"] == pytest.approx(sum(shares) / len(shares))
        assert results[f"{prefix}pass@2"]["mean"] == pytest.approx(sum(pairs) / len(pairs))
        assert results[f"{prefix}greedy"]["mean"] == pytest.approx(sum(greedy) / len(greedy))
    assert 0 < results["avg@4"]["low"] < results["avg@4"]["mean"] < results["avg@4"]["high"] < 1
    assert results["problems"] == 6


def test_predictions_resume_where_a_killed_process_stopped(model: Path, tmp_path: Path) -> None:
    how = {"val_samples": 2}
    whole = Path(trainer(tmp_path, **how).predict(grpo(model), ROWS)["path"])
    text = whole.read_text()
    assert [(each["row"], each["sample"]) for each in lines(whole)] == [(row, i) for row in range(6) for i in range(2)]
    # What is left of a process that was killed within the line of row 2, sample 0.
    kept = text.splitlines(keepends=True)
    first = json.dumps(json.loads(kept[0]) | {"response": "written before"}) + "\n"
    (whole.parent / "part-0-0.jsonl").write_text("".join([first, *kept[1:4]]) + kept[4][:20])
    whole.unlink()
    again = trainer(tmp_path, **how).predict(grpo(model), ROWS)
    assert (again["found"], whole.read_text()) == (2, text.replace(kept[0], first))


def test_responses_have_the_row_s_place_in_the_dataset_where_rows_are_dropped(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * 20, "answer": "1"}, *ROWS[:3]]
    data = PromptData(
        rows, rows, prompts_per_step=2, max_prompt_length=8, overlong_rows="drop", curriculum=Curriculum()
    )
    trainer(tmp_path).test(grpo(model), data)
    tested = lines(tmp_path / "run-test" / "responses.jsonl")
    assert [each["row"] for each in tested if each["greedy"]] == [1, 2, 3]
    # It calls no reward, and so the curriculum has none either.
    predicted = Path(trainer(tmp_path).predict(grpo(model), data)["path"])
    assert [(each["row"], each["prompt"]) for each in lines(predicted)] == [(i, rows[i]["prompt"]) for i in (1, 2, 3)]
    predicted.rename(predicted.parent / "part-0-0.jsonl")
    assert trainer(tmp_path).predict(grpo(model), data)["found"] == 3


def test_gail_asks_responses_of_the_rows_that_it_trains_on_alone(model: Path, tmp_path: Path) -> None:
    def gail() -> GAIL:
        return GAIL(
            CausalLM(str(model)), discriminator=RewardModel(str(model)), reward=has_a_letter, max_response_length=3
        )

    assert trainer(tmp_path).predict(gail(), ROWS)["found"] == 0
    learned = PromptData([{**row, "response": "1"} for row in ROWS], ROWS, prompts_per_step=2)
    assert 0 <= trainer(tmp_path, max_steps=1).fit(gail(), learned)["reward_after"] <= 1
    with pytest.raises(UserError, match="has no column `response`"):
        trainer(tmp_path, max_steps=1).fit(gail(), ROWS)


def test_a_checkpoint_is_tested_as_the_model_of_a_run_that_ends_there(model: Path, tmp_path: Path) -> None:
    rows = [{**row, "response": f"{row['answer']}b"} for row in ROWS]
    sft = SFT(CausalLM(str(model), optimizer=Optimizer(lr=0.03)))
    for steps in (1, 2):
        run = Trainer(tmp_path / f"{steps}", accelerator="cpu", max_steps=steps, save_every_n_steps=1)
        run.fit(sft, PromptData(rows, prompts_per_step=3))

    def tested(folder: str) -> tuple[dict[str, Any], str]:
        algorithm, name = grpo(tmp_path / folder), folder.replace("/", "-")
        found = trainer(tmp_path / "of" / name, val_samples=4).test(algorithm, PromptData(ROWS, ROWS))
        return found, (tmp_path / "of" / name / "run-test/responses.jsonl").read_text()

    expected, last = tested("1/model"), tested("2/model")
    assert tested("2/checkpoint/step-00000001") == expected
    assert tested("2/checkpoint/step-00000002") == last
    assert expected[1] != last[1]


def test_of_several_roles_in_a_checkpoint_the_model_is_that_of_its_own_or_the_actor(
    model: Path, tmp_path: Path
) -> None:
    ppo = PPO(CausalLM(str(model)), reward=has_a_letter, max_response_length=3)
    trainer(tmp_path, max_steps=1, save_every_n_steps=1).fit(ppo, PromptData(ROWS, prompts_per_step=2))
    run = tmp_path / "run"
    checkpoint = run / "checkpoint/step-00000001"
    for role, expected in (("critic", "model-critic"), ("reference", "model"), ("actor", "model")):
        found = resolve_model(str(checkpoint), tmp_path / "scratch", role=role)
        written, of_run = (load_file(each / "model.safetensors") for each in (found, run / expected))
        assert written.keys() == of_run.keys()
        assert all(torch.equal(written[name], of_run[name]) for name in written)
    (checkpoint / "actor.json").rename(checkpoint / "student.json")
    with pytest.raises(UserError, match="has critic, student, and neither `reference` nor `actor`; write one of them"):
        resolve_model(str(checkpoint), tmp_path / "scratch", role="reference")


class Splits(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.of_stage = {"fit": ROWS[:3], "test": ROWS[:2], "predict": ROWS[:1]}[stage]

    def val_dataloader(self) -> Any:
        return DataLoader(self.of_stage, collate_fn=list)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


def test_a_data_module_is_asked_for_the_rows_of_the_command(model: Path, tmp_path: Path) -> None:
    assert trainer(tmp_path).validate(grpo(model), Splits())["problems"] == 3
    assert trainer(tmp_path).test(grpo(model), Splits())["problems"] == 2
    assert len(lines(Path(trainer(tmp_path).predict(grpo(model), Splits())["path"]))) == 1


@pytest.mark.slow
def test_predictions_of_other_prompts_start_again(model: Path, tmp_path: Path) -> None:
    trainer(tmp_path).predict(grpo(model), ROWS)
    assert trainer(tmp_path).predict(grpo(model), ROWS[:5])["found"] == 0
    assert len(lines(tmp_path / "run-predict" / "responses.jsonl")) == 5


@pytest.mark.slow
def test_the_folder_of_a_run_stands_for_its_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "model").symlink_to(model)
    of_run = trainer(tmp_path / "1").predict(grpo(tmp_path / "trained"), ROWS)["path"]
    assert Path(of_run).read_text() == Path(trainer(tmp_path / "2").predict(grpo(model), ROWS)["path"]).read_text()


def test_predictions_of_a_checkpoint_are_refused_and_a_monitor_is_ignored(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and `rlflow predict` reads a model; leave it out"):
        trainer(tmp_path, ckpt_path="runs/x/checkpoint").predict(grpo(model), ROWS)
    monitored = trainer(tmp_path, monitor="val/accuracy", save_top_k=1, save_every_n_steps=1)
    assert monitored.predict(grpo(model), ROWS)["found"] == 0


def test_what_generates_nothing_predicts_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SFT generates nothing"):
        trainer(tmp_path).predict(SFT(str(model)), PromptData(ROWS, response="answer"))


@pytest.mark.parametrize("config", slow_but(CONFIGS[:1], CONFIGS), ids=lambda config: config.stem)
def test_a_config_of_a_benchmark_has_settings_that_exist(config: Path) -> None:
    assert read_fit(["--config", str(config), "--module.actor", "runs/mine"]).trainer.settings.val_samples > 1
