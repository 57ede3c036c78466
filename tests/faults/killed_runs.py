"""Small runs that are killed at a point and continued, and their comparison with a run that nobody killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import rlflow.checkpoint.contents
import rlflow.checkpoint.writing
import rlflow.run.fit
from rlflow import CausalLM, Environment, Optimizer, ValueModel
from rlflow.algorithms import DAPO, DPO, GRPO, PPO, SFT
from rlflow.callbacks import Callback
from rlflow.controller.training import Training
from rlflow.data import RandomRows
from rlflow.data.prompts import PromptData
from rlflow.functional import KL
from rlflow.loggers.jsonl import JSONLLogger
from rlflow.module import RLModule
from rlflow.rollout import TransformersEngine, VLLMEngine
from rlflow.run.saving import Saving
from rlflow.storage.draft import Draft
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess, TrainingStrategy
from tests.controller.answering import Counting
from tests.controller.runs import Fit, OddCharacters, sums, trainer_of
from tests.data.list_source import Listed

STEPS, KILLED_AFTER = 4, 2
STOP = tuple(range(40, 60))  # ends the responses of a random model after about six tokens
ADAMW = Optimizer("adamw", lr=3e-3, warmup_steps=1, schedule="linear")
UPDATES = {"epochs": 2, "samples_per_update": 4}
LONGEST = 12
PAIRS = [
    {"question": f"{i}+{i}=", "good": "abcdefghijklm"[: i * 5 % 13], "bad": "nopqrstuvwxyz"[: i * 7 % 13 + 1]}
    for i in range(16)
]
ROLES = {"grpo": ("actor",), "ppo": ("actor", "critic", "reference")}
STRATEGIES: dict[str, Callable[[], TrainingStrategy]] = {
    "single": SingleProcess,
    **{f"zero{stage}": partial(DeepSpeedStrategy, stage) for stage in range(4)},  # type: ignore[arg-type]
    "fsdp": FSDPStrategy,
}


class Draws(OddCharacters):
    """Also worth what the generators of the process give, as a reward of a user's may draw."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        drawn = random.random() + float(numpy.random.random()) + float(torch.rand(()))
        return super().score_sample(text, row) + drawn


class IsEven(OddCharacters):
    """Some groups of two are worth the same."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return super().score_sample(text, row) % 2


@dataclass(frozen=True)
class Kind:
    """A kind of runs.

    Attributes:
        algorithm: `grpo`; `ppo` with a critic, a reference and a coefficient that adapts; `dapo` with groups left over;
            `partial` with responses cut off; `turns` with an environment, `cut turns` with conversations cut off;
            `dpo` of pairs and `sft` of rows, which generate nothing; `pictures` in prompts, for PPO.
        place: `one` rank, or two that do all `together`, live `apart`, or have steps `overlapping`.
        strategy: Strategy of training.
        engine: Engine of generation.
        async_save: Whether it writes while steps run.
    """

    algorithm: str
    place: str
    strategy: str
    engine: str
    async_save: bool

    def __str__(self) -> str:
        return "-".join(
            [self.algorithm, self.place, self.strategy, self.engine, "beside" if self.async_save else "waits"]
        )

    @property
    def ranks(self) -> int:
        """Number of ranks of the run."""
        return 1 if self.place == "one" else 2

    def run(self, model: Path, folder: Path, **more: Any) -> Fit:
        """It, from a model, in a folder."""
        settings: dict[str, Any] = {"max_steps": STEPS, "save_every_n_steps": 1, "async_save": self.async_save}
        if self.place in ("apart", "overlapping"):
            trains = {"actor": 1, "critic": 1, "reference": 1} if self.algorithm == "ppo" else {"actor": 1}
            settings["placement"] = {"rollout": 0, **trains}
        if self.place == "overlapping":
            settings["max_staleness"] = 1
        if self.algorithm == "partial":
            settings["partial_rollout"] = 4
        if self.algorithm == "cut turns":
            settings["partial_rollout"] = 7
        has_turns = self.algorithm in ("turns", "cut turns")
        data = sums(16, 4, held_out=0 if has_turns else 2)
        if self.algorithm in ("dpo", "sft"):
            rejected = "bad" if self.algorithm == "dpo" else None
            data = PromptData(Listed(PAIRS), Listed(PAIRS[:2]), 4, response="good", rejected=rejected)
        if self.algorithm == "pictures":
            cells = "rlflow.configs.cells.count"
            held_out = RandomRows(cells, 2, seed=1)
            data = PromptData(RandomRows(cells, 16), held_out, 4, prompt="question", images="image")
        if has_turns:
            data.chat_template, data.max_prompt_length = True, 120
        else:
            settings["val_check_interval"] = 2
        engine = TransformersEngine() if self.engine == "transformers" else VLLMEngine(kv_cache_gib=0.25)
        return Fit(self._module(model), data, folder, STRATEGIES[self.strategy], engine, {**settings, **more})

    def _module(self, model: Path) -> RLModule:
        tower = {"vision_tower_lr": 1e-3} if self.algorithm == "pictures" else {}
        actor = CausalLM(str(model), optimizer=ADAMW, **UPDATES, **tower)  # type: ignore[arg-type]
        made: GRPO | PPO | DAPO
        if self.algorithm == "sft":
            return SFT(actor)
        if self.algorithm == "dpo":
            return DPO(actor, 0.5)
        if self.algorithm in ("ppo", "pictures"):
            of_critic = Optimizer("adamw", lr=1e-2)
            critic = ValueModel(str(model), optimizer=of_critic, **UPDATES, **tower)  # type: ignore[arg-type]
            made = PPO(actor, Draws(), 2, LONGEST, critic=critic, kl=KL(0.1, target=1e-3, horizon=50.0))
        elif self.algorithm == "dapo":
            made = DAPO(actor, IsEven(), 2, LONGEST)
        elif self.algorithm in ("turns", "cut turns"):
            answering = "Counting" if self.algorithm == "turns" else "Stateful"  # else what is cut off begins anew
            environment = Environment(f"tests.controller.answering.{answering}", max_turns=2, max_turn_length=6)
            made = GRPO(actor, environment=environment, group_size=2, max_response_length=90)
        else:
            made = GRPO(actor, Draws(), 2, LONGEST)
        if "turns" not in self.algorithm:
            made.stop_token_ids = STOP
        return made


class Kills(Callback):
    """Ends the processes of all ranks by SIGKILL, when the first of them comes to a point.

    Args:
        point: One of `POINTS`, or `before NODE`, `after NODE`, `at TASK`.
        pids: A folder.
    """

    def __init__(self, point: str, pids: Path) -> None:
        self.point, self.pids = point, pids
        self.armed = False

    def on_step_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.armed |= step == KILLED_AFTER
        self.reached("end of a step")

    def on_validation_end(self, trainer: Any, module: Any, step: int, metrics: Any) -> None:
        self.reached("after validation")

    def on_task_start(self, trainer: Any, module: Any, task: str, step: int) -> None:
        kind, name = task.split()[:2] if " " in task else (task, "")
        self.reached(f"at {kind}")
        if kind == "train":
            self.reached(f"before {name.rstrip(':')}")

    def on_node_start(self, trainer: Any, module: Any, node_id: str) -> None:
        self.reached(f"before {node_id}")

    def on_node_end(self, trainer: Any, module: Any, node_id: str) -> None:
        self.reached(f"after {node_id}")

    def on_weight_sync(self, trainer: Any, module: Any, policy: str, version: int) -> None:
        self.reached("after a weight sync")

    def reached(self, point: str) -> None:
        """This rank is there."""
        if self.armed and point == self.point:
            for path in sorted(self.pids.iterdir(), key=lambda path: int(path.name) == dist_rank()):
                os.kill(int(path.read_text()), signal.SIGKILL)


def dist_rank() -> int:
    """This one."""
    return dist.get_rank() if dist.is_initialized() else 0


def fit_to_the_end(run: Fit) -> None:
    """Train, without a kill."""
    trainer_of(run, run.strategy(), []).fit(run.module, run.data)


def fit_until_killed(run: Fit, point: str, pids: Path) -> None:
    """Train to the point; this process does not come back, and if it does, the point was never reached."""
    pids.mkdir(exist_ok=True)
    (pids / str(dist_rank())).write_text(str(os.getpid()))
    if dist.is_initialized():
        dist.barrier()
    kills = Kills(point, pids)
    _after(Training, "run", partial(kills.reached, point), lambda _, node, *__: point == f"after {node.id}")
    if point in POINTS:
        POINTS[point](partial(kills.reached, point), run)
    if point == "while it is resumed":
        kills.armed = True
    trainer_of(run, run.strategy(), [kills]).fit(run.module, run.data)


Reached = Callable[[], None]


def _always(*given: Any) -> bool:
    return True


def _before(owner: Any, name: str, reached: Reached, when: Callable[..., bool] = _always) -> None:
    _around(owner, name, when, before=reached)


def _after(owner: Any, name: str, reached: Reached, when: Callable[..., bool] = _always) -> None:
    _around(owner, name, when, after=reached)


def _around(
    owner: Any, name: str, when: Callable[..., bool], before: Reached | None = None, after: Reached | None = None
) -> None:
    original = getattr(owner, name)

    def around(*given: Any, **named: Any) -> Any:
        if before is not None and when(*given):
            before()
        result = original(*given, **named)
        if after is not None and when(*given):
            after()
        return result

    setattr(owner, name, around)


def _of_checkpoint(draft: Draft, *_: Any) -> bool:
    return draft.target.name.startswith("step-")


def _of_model(draft: Draft, *_: Any) -> bool:
    return draft.target.name == "model"


def _between_tensors(reached: Reached, run: Fit) -> None:
    original = rlflow.checkpoint.writing.write_tensors

    def write(path: Path, entries: Any, tensors: Any, *more: Any) -> str:
        def each() -> Any:
            for number, tensor in enumerate(tensors):
                if number == len(entries) // 2:
                    reached()
                yield tensor

        return original(path, entries, each(), *more)

    rlflow.checkpoint.writing.write_tensors = write


def _while_removing(reached: Reached, run: Fit) -> None:
    original = rlflow.checkpoint.writing.shutil.rmtree

    def remove(path: Path, *given: Any, **named: Any) -> None:
        if Path(path).name.startswith("step-") and not Path(path).name.endswith((".draft", ".before")):
            next(file for file in sorted(Path(path).iterdir()) if file.is_file()).unlink()
            reached()
        original(path, *given, **named)

    rlflow.checkpoint.writing.shutil.rmtree = remove  # type: ignore[assignment]


def _between_renames(reached: Reached, run: Fit) -> None:
    _before(Path, "rename", reached, lambda path, *_: path.name == "model.draft")


def _half_a_line(reached: Reached, run: Fit) -> None:
    def log(self: JSONLLogger, metrics: Any, step: int) -> None:
        text = json.dumps({"step": step, **metrics}) + "\n"
        self._metrics.write(text[: len(text) // 2])
        self._metrics.flush()
        reached()
        self._metrics.write(text[len(text) // 2 :])
        self._metrics.flush()

    JSONLLogger.log_metrics = log  # type: ignore[method-assign]


def _sync_begun(reached: Reached, run: Fit) -> None:
    owner = type(run.engine)
    original = owner.update_weights

    def update(self: Any, buckets: Any, version: int) -> Any:
        def each() -> Any:
            for number, bucket in enumerate(buckets):
                yield bucket
                if number == 0:
                    reached()

        return original(self, each(), version)

    owner.update_weights = update  # type: ignore[method-assign]


POINTS: dict[str, Callable[[Reached, Fit], None]] = {
    "in a rollout": lambda reached, run: _after(type(run.engine), "generate", reached),
    "in a reward": lambda reached, run: _after(OddCharacters, "score_sample", reached),
    "in a turn of an environment": lambda reached, run: _before(Counting, "step", reached),
    "before an update": lambda reached, run: _before(_class_of(run), "step", reached),
    "after an update": lambda reached, run: _after(_class_of(run), "step", reached),
    "in a weight sync": _sync_begun,
    "before a save": lambda reached, run: _before(Saving, "save", reached),
    "between tensors of a file": _between_tensors,
    "before a rank's record": lambda reached, run: _before(Draft, "add", reached, _of_checkpoint),
    "after a rank's record": lambda reached, run: _after(Draft, "add", reached, _of_checkpoint),
    "before the manifest": lambda reached, run: _before(rlflow.checkpoint.writing, "write_manifest", reached),
    "before the commit": lambda reached, run: _before(Draft, "complete", reached, _of_checkpoint),
    "after the commit": lambda reached, run: _after(Draft, "complete", reached, _of_checkpoint),
    "before a model's commit": lambda reached, run: _before(Draft, "complete", reached, _of_model),
    "between a model's renames": _between_renames,
    "after a model's commit": lambda reached, run: _after(Draft, "complete", reached, _of_model),
    "while an old checkpoint is removed": _while_removing,
    "after a save": lambda reached, run: _after(Saving, "save", reached),
    "in a validation": lambda reached, run: _before(rlflow.run.fit, "measure", reached),
    "in the middle of a line of metrics": _half_a_line,
    "while it is resumed": lambda reached, run: _after(rlflow.checkpoint.contents, "restore", reached),
}


def _class_of(run: Fit) -> type:
    return type(run.strategy())


def content(folder: Path) -> dict[str, Any]:
    """The results of a run that must be equal, by name: files as bytes, JSON and tables without times and memory."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        kept = name.startswith(("checkpoint/", "model")) or name in ("metrics.jsonl", "samples.jsonl")
        if not path.is_file() or not kept:
            continue
        if path.name == "state.json":
            stored = json.loads(path.read_text())
            stored["files"] = sorted(stored["files"])  # whose content is compared; digests and sizes tell of times
            found[name] = _without_measures(stored)
        elif path.name.startswith("logged-"):
            found[name] = _without_measures(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [_without_measures(json.loads(line)) for line in path.read_text().splitlines()]
        else:
            found[name] = path.read_bytes()
    return found


def _without_measures(value: Any) -> Any:
    if isinstance(value, dict):
        stays = {key: each for key, each in value.items() if not _measured(key)}
        return {key: _without_measures(each) for key, each in stays.items() if key != "sha256"}
    return [_without_measures(each) for each in value] if isinstance(value, list) else value


def _measured(key: str) -> bool:
    """Measurements of the process: a resumed run does not hold what was in use before it was saved."""
    return key.startswith("time/") or key.endswith(("_seconds", "_wait", "held_bytes_max"))
