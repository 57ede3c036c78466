"""A run resumes from a checkpoint as if it had never stopped."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow import checkpoint
from rlflow.callbacks import Callback
from rlflow.errors import UserError
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import SingleProcess, TrainingStrategy
from rlflow.trainer import Trainer
from tests.checkpoint_files import write_checkpoint, write_state
from tests.controller.runs import FSDP, ZERO2, ZERO3, Fit, failing_fit, fit, grpo, sums
from tests.faults.killed_runs import Kind
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage, all_weights, backward, launch, trained

ADAMW = Optimizer("adamw", lr=1e-2, weight_decay=0.1, warmup_steps=2, gradient_clipping=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are large enough for ZeRO-3 to divide."""
    return write_tiny_model(tmp_path_factory.mktemp("checkpoint") / "tiny", hidden_size=128, layers=1)


def train_on(
    model: Path, stage: Stage, precision: str, folder: Path, resume: bool, updates: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Updates of one role, continued from the checkpoint in `folder` or else from the model; then a checkpoint."""
    strategy = launch(stage, precision)
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    if resume:
        found = checkpoint.find("last", folder)
        assert checkpoint.read_progress(found, 0, "rows").step == 2
        checkpoint.restore(found, strategy, ["actor"])
    norms = []
    for _ in range(updates):
        backward(strategy, "actor", handle)
        norms.append(strategy.step("actor"))
    write_checkpoint(strategy, folder, strategy.roles["actor"].done)
    return norms, all_weights(strategy, "actor")


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([(2, "bf16")], [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), ("fsdp", "bf16")]),
)
def test_updates_after_a_checkpoint_are_those_of_a_run_that_never_stopped(
    stage: Stage, precision: str, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    through = ranks2.run(train_on, model, stage, precision, tmp_path / "through", False, 4)
    ranks2.run(train_on, model, stage, precision, tmp_path / "parts", False, 2)
    resumed = ranks2.run(train_on, model, stage, precision, tmp_path / "parts", True, 2)
    for (norms, weights), (norms_resumed, weights_resumed) in zip(through, resumed, strict=True):
        assert norms_resumed == norms[2:]
        assert all(torch.equal(weights[name], weights_resumed[name]) for name in weights)


@pytest.mark.parametrize(
    ("stage", "precision"),
    slow_but([("fsdp", "bf16")], [(3, "fp32"), ("fsdp", "fp32"), (3, "bf16"), ("fsdp", "bf16")]),
)
def test_tensors_that_three_ranks_do_not_divide_are_continued_to_the_bit(
    stage: Stage, precision: str, model: Path, tmp_path: Path, ranks3: RankPool
) -> None:
    through = ranks3.run(train_on, model, stage, precision, tmp_path / "through", False, 4)
    ranks3.run(train_on, model, stage, precision, tmp_path / "parts", False, 2)
    resumed = ranks3.run(train_on, model, stage, precision, tmp_path / "parts", True, 2)
    for (norms, weights), (norms_resumed, weights_resumed) in zip(through, resumed, strict=True):
        assert {weight.numel() % 3 for weight in weights.values()} == {0, 1, 2}
        assert norms_resumed == norms[2:]
        assert all(torch.equal(weights[name], weights_resumed[name]) for name in weights)


@pytest.mark.parametrize(
    ("before", "after"), slow_but([(3, 0), (2, "fsdp")], [(2, 3), (3, 0), (0, 1), ("fsdp", 3), (2, "fsdp")])
)
def test_another_stage_and_number_of_ranks_continue_a_checkpoint(
    before: Stage, after: Stage, model: Path, tmp_path: Path, ranks2: RankPool, ranks1: RankPool
) -> None:
    through = ranks2.run(train_on, model, before, "fp32", tmp_path / "through", False, 4)
    ranks2.run(train_on, model, before, "fp32", tmp_path / "parts", False, 2)
    ((norms, weights),) = ranks1.run(train_on, model, after, "fp32", tmp_path / "parts", True, 2)
    assert norms == pytest.approx(through[0][0][2:], rel=1e-4)
    for name, expected in through[0][1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=2e-4)  # AdamW: in units of the rate, 1e-2


class StopAfter(Callback):
    """Ends the run after a step, and counts the steps that it saw."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.seen += 1
        trainer.should_stop |= step == self.step

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_run_that_was_stopped_resumes_with_the_same_metrics_to_the_byte(model: Path, tmp_path: Path) -> None:
    def run(name: str, stop: int, ckpt_path: str | None = None) -> tuple[list[dict[str, Any]], StopAfter]:
        notes = StopAfter(stop)
        settings = {"max_steps": 4, "save_every_n_steps": 3, "ckpt_path": ckpt_path, "callbacks": [notes]}
        fit(
            Fit(grpo(model, epochs=2, samples_per_update=5), sums(8, 2, held_out=3), tmp_path / name, settings=settings)
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        recorded = [json.loads(line) for line in lines]
        return [{key: x for key, x in of.items() if not key.startswith("time/")} for of in recorded], notes

    through, _ = run("through", 4)
    stopped, _ = run("parts", 2)
    assert [of["step"] for of in stopped] == [0, 1, 2]
    resumed, notes = run("parts", 4, "last")
    assert [of["step"] for of in resumed] == [0, 1, 2, 3, 4]
    assert resumed[3:] == through[3:]
    assert notes.seen == 4


def test_a_checkpoint_that_is_named_another_way_than_its_folder_is_continued_in_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    for steps, ckpt_path in ((1, None), (2, f"{tmp_path}/link/checkpoint/step-00000001")):
        settings = {"max_steps": steps, "save_every_n_steps": 1, "ckpt_path": ckpt_path}
        fit(Fit(grpo(model), sums(4, 2), tmp_path / "run", settings=settings))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]


class Fails(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        raise UserError("before its first step")


def test_a_run_that_goes_back_and_dies_early_leaves_no_checkpoint_of_later_steps(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 2, "save_every_n_steps": 1}
    fit(Fit(grpo(model), sums(4, 2), tmp_path, settings=settings))
    back = {"ckpt_path": str(tmp_path / "checkpoint/step-00000001"), "callbacks": [Fails()]}
    with pytest.raises(UserError, match="before its first step"):
        fit(Fit(grpo(model), sums(4, 2), tmp_path, settings={**settings, **back}))
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-00000001"]


def test_a_checkpoint_holds_no_pickle_and_its_manifest_says_what_every_rank_wrote(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    ranks2.run(train_on, model, 2, "fp32", tmp_path, False, 1)
    (folder,) = (tmp_path / "checkpoint").iterdir()
    names = ["actor-00000-of-00002.safetensors", "actor-00001-of-00002.safetensors", "actor.json"]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "state.json"]
    stored = json.loads((folder / "state.json").read_text())
    assert stored["step"] == 1
    assert stored["files"] == {
        name: {
            "size": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            "rank": rank,
        }
        for name, rank in zip(names, (0, 1, 0), strict=True)
    }


def refusal(model: Path, optimizer: Optimizer, folder: Path) -> str:
    """The error of a role of one process for a checkpoint that is not its own; its weights stay as before."""
    strategy = SingleProcess()
    strategy.setup_role("actor", trained(model, optimizer), model)
    before = all_weights(strategy, "actor")
    with pytest.raises(UserError) as refused:
        checkpoint.restore(checkpoint.find("last", folder), strategy, ["actor"])
    assert all(torch.equal(weight, before[name]) for name, weight in all_weights(strategy, "actor").items())
    return str(refused.value)


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a checkpoint of one process."""
    folder = tmp_path_factory.mktemp("written")
    strategy = SingleProcess()
    handle = trained(model, ADAMW)
    strategy.setup_role("actor", handle, model)
    backward(strategy, "actor", handle)
    strategy.step("actor")
    write_checkpoint(strategy, folder, 1)
    return folder


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (
            {"layers": 2},
            r"actor.json has no `model.layers.1.* of role `actor`, which this run trains; continue",
        ),
        (
            {"intermediate_size": 96},
            r"mlp.*` of role `actor` is \[384, 128\] in .*actor.json and \[96, 128\] in this",
        ),
        ({"tie": False}, r"actor.json has no `lm_head.weight` of role `actor`"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    shape: dict[str, Any], says: str, written: Path, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / "other", **{"hidden_size": 128, "layers": 1, **shape})
    assert re.search(says, refusal(other, ADAMW, written))


def test_a_checkpoint_of_more_layers_than_are_trained_is_refused(model: Path, tmp_path: Path) -> None:
    larger = write_tiny_model(tmp_path / "larger", hidden_size=128, layers=2)
    strategy = SingleProcess()
    strategy.setup_role("actor", trained(larger, ADAMW), larger)
    write_checkpoint(strategy, tmp_path, 1)
    assert "has `model.layers.1.input_layernorm.weight` of role `actor`, which this run does not train; continue" in (
        refusal(model, ADAMW, tmp_path)
    )


def test_a_checkpoint_of_another_optimizer_is_refused(model: Path, written: Path) -> None:
    said = refusal(model, Optimizer("sgd", lr=0.1, arguments={"momentum": 0.9}), written)
    assert (
        "actor.json has weight, exp_avg, exp_avg_sq of each weight, and this run's optimizer keeps weight, moment"
        in (said)
    )


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"format": 5, "step": 2, "files": {"actor.json": 7}}))
    assert checkpoint.find(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(UserError, match=r"has the checkpoint format 5; this version of rlflow reads format 15"):
        checkpoint.read_progress(tmp_path, 0, "rows")


def test_files_are_read_once_by_ranks_in_equal_shares_to_see_whether_they_changed(tmp_path: Path) -> None:
    sizes = {"a": 6, "b": 5, "c": 4, "d": 3}
    files = {name: {"size": size, "sha256": "", "rank": 0} for name, size in sizes.items()}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    write_state(tmp_path, {"format": checkpoint.FORMAT, "files": files})
    # the largest first, each to the rank with the least so far: a | b, then c to b's, then d to a's
    assert [checkpoint.changed_files(tmp_path, rank, 2) for rank in range(2)] == [["a", "d"], ["b", "c"]]


class Spoils(Callback):
    """Makes an entry NaN after a step, or sets another value.

    Args:
        rank: The only rank on which it happens; None for all.
        after: The step.
        kind: Kind of state of the first weight, as a checkpoint has it; None for the weight that forward passes read.
        role: Role whose weight it is.
        value: Value of the entry.
    """

    def __init__(
        self,
        rank: int | None,
        after: int,
        kind: str | None = "weight",
        role: str = "actor",
        value: float = torch.nan,
    ) -> None:
        self.rank, self.after, self.kind, self.role, self.value = rank, after, kind, role, value

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        strategy = trainer.strategy
        assert strategy is not None
        if step != self.after or self.rank not in (None, strategy.global_rank):
            return
        if self.kind is None:
            strategy._part_of(strategy.roles[self.role].model.trained()[0].parameter).values.data[-1] = self.value
        else:
            parts = next(parts for _, _, parts in strategy.state_parts(self.role) if parts[self.kind].values.numel())
            parts[self.kind].values.data[-1] = self.value


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("strategy", "kind", "async_save"),
    slow_but(
        [(ZERO3, "weight", False), (ZERO2, "exp_avg", True)],
        itertools.product([ZERO2, ZERO3, FSDP], ["weight", "exp_avg"], [False, True]),
    ),
)
def test_nan_weights_of_one_rank_are_not_saved_and_the_last_good_files_stay(
    strategy: Callable[[], TrainingStrategy],
    kind: str,
    async_save: bool,
    model: Path,
    tmp_path: Path,
    ranks2: RankPool,
) -> None:
    settings = {"max_steps": 2, "save_every_n_steps": 1, "callbacks": [StopAfter(1)]}
    run = Fit(grpo(model), sums(8, 2), tmp_path / "run", strategy, settings=settings)
    ranks2.run(fit, run)
    good = {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")}
    again = {**settings, "callbacks": [Spoils(1, 2, kind)], "ckpt_path": "last", "async_save": async_save}
    first, second = (result.error for result in ranks2.run(failing_fit, replace(run, settings=again)))
    assert first == second
    what = {
        "weight": "the weights of `actor` are infinite or NaN, of 'model.",
        "exp_avg": "'exp_avg', which the optimizer keeps of the weights of `actor`, is infinite or NaN, of 'model.",
    }
    assert first.startswith(what[kind])
    assert re.search(
        "first, so (step-00000002|model after step 2) was not saved; what was saved before is still there", first
    )
    assert {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model")} == good
    assert not [path.name for path in (tmp_path / "run").rglob("*.draft")]


def test_a_model_that_is_infinite_where_the_checkpoint_is_not_is_named_with_its_step(
    model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    # The largest number of float32, in which the optimizer keeps weights, is infinite in bf16, as the model has them.
    spoils = Spoils(1, 2, value=torch.finfo(torch.float32).max)
    settings = {"max_steps": 2, "save_every_n_steps": 2, "callbacks": [spoils], "async_save": True}
    run = Fit(grpo(model), sums(8, 2), tmp_path, partial(ZERO2, precision="bf16"), settings=settings)
    first, second = (result.error for result in ranks2.run(failing_fit, run))
    assert first == second
    assert first.startswith("the weights of `actor` are infinite or NaN, of 'model.")
    assert "first, so model after step 2 was not saved; what was saved before is still there" in first


@pytest.mark.parametrize("async_save", slow_but([True], [False, True]))
def test_the_models_of_other_roles_stay_where_one_has_nan(
    async_save: bool, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    settings = {"max_steps": 2, "save_every_n_steps": 1, "placement": {"rollout": 0, "actor": 0, "critic": 1}}
    run = Kind("ppo", "together", "zero2", "transformers", async_save).run(model, tmp_path / "run")
    run = replace(run, settings={**settings, "callbacks": [StopAfter(1)], "async_save": async_save})
    ranks2.run(fit, run)
    good = {name: content(tmp_path / "run" / name) for name in ("checkpoint", "model", "model-critic")}
    again = {**run.settings, "callbacks": [Spoils(1, 2, "exp_avg", "critic")], "ckpt_path": "last"}
    first, second = (result.error for result in ranks2.run(failing_fit, replace(run, settings=again)))
    assert first == second
    assert "of the weights of `critic`, is infinite or NaN" in first
    assert {name: content(tmp_path / "run" / name) for name in good} == good


@pytest.mark.parametrize("lora", [None, LoRA(4)])
def test_a_model_with_nan_is_not_saved_where_no_checkpoints_are(
    lora: LoRA | None, model: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    settings = {"max_steps": 2, "save_every_n_steps": None, "callbacks": [Spoils(None, 2, None)]}
    module = grpo(model)
    module.actor.lora = lora
    run = Fit(module, sums(8, 2), tmp_path / "run", ZERO2, settings=settings)
    first, second = (result.error for result in ranks2.run(failing_fit, run))
    assert first == second
    assert first.startswith("the weights of `actor` are infinite or NaN, of ")
    assert "first, so model was not saved; what was saved before is still there" in first
    assert not (tmp_path / "run/model").exists()


def test_the_last_two_checkpoints_are_kept_and_those_of_an_abandoned_future_are_not(
    model: Path, tmp_path: Path
) -> None:
    def run(**settings: Any) -> list[str]:
        given = {"max_steps": 4, "save_every_n_steps": 1, **settings}
        fit(Fit(module, sums(8, 2), tmp_path / "run", settings=given))
        return there()

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "run/checkpoint").iterdir())

    module = grpo(model)
    three = ["step-00000002", "step-00000003", "step-00000004"]
    assert run(save_last=3, callbacks=[StopAfter(4)]) == three
    recorded = (tmp_path / "run/metrics.jsonl").read_bytes()
    second = str(tmp_path / "run/checkpoint/step-00000002")
    module = grpo(model, optimizer=Optimizer("sgd", lr=0.1, arguments={"momentum": 0.9}))
    with pytest.raises(UserError, match="continue with the same `optimizer`"):
        run(ckpt_path=second)
    assert there() == three  # a resume that is refused removes none
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == recorded
    module = grpo(model)
    assert run(ckpt_path=second, callbacks=[StopAfter(3)]) == ["step-00000002", "step-00000003"]


def test_the_last_checkpoint_is_the_last_complete_one(tmp_path: Path) -> None:
    def write(name: str, **files: int) -> Path:
        folder = tmp_path / "checkpoint" / name
        folder.mkdir(parents=True)
        (folder / "actor.json").write_text("12345")
        sizes = {file: {"size": size} for file, size in (files or {"actor.json": 5}).items()}
        stored = {"format": checkpoint.FORMAT, "step": 1, "files": sizes}
        write_state(folder, stored)
        return folder

    complete = write("step-00000001")
    write("step-00000002", **{"actor.json": 6})
    write("step-00000003", **{"actor.json": 5, "actor-00000-of-00001.safetensors": 9})
    (write("step-00000004") / "state.json").write_text("{")
    write("step-00000005.draft")
    assert checkpoint.find("last", tmp_path) == complete
    with pytest.raises(UserError, match=r"step-00000002', which has 5 of the 6 bytes of actor.json; give a checkpoint"):
        checkpoint.find(str(tmp_path / "checkpoint/step-00000002"), tmp_path)
    with pytest.raises(
        UserError, match=r"give a checkpoint's folder, `last`, `best` or `auto`\. Did you mean \"auto\"\?$"
    ):
        checkpoint.find("atuo", tmp_path)


def test_a_run_without_a_checkpoint_has_no_last_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`trainer.ckpt_path` is `last`, but .* has no checkpoint"):
        checkpoint.find("last", tmp_path)


@pytest.mark.parametrize(("seed", "data", "told"), [(1, "rows", "`seed` is 1"), (0, "others", "training rows")])
def test_another_seed_or_dataset_does_not_continue_a_run(seed: int, data: str, told: str, tmp_path: Path) -> None:
    stored = {"format": checkpoint.FORMAT, "step": 2, "seed": 0, "data": "rows", "files": {}}
    write_state(tmp_path, stored)
    with pytest.raises(UserError, match=told):
        checkpoint.read_progress(tmp_path, seed, data)
