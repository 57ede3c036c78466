"""A user's own folder for tests: a config, data, an algorithm and rewards, all small."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "seed": 0,
    "module": {
        "class_path": "rlflow.algorithms.GRPO",
        "init_args": {
            "actor": {"model": "tiny"},
            "group_size": 2,
            "max_response_length": 4,
            "reward": {"class_path": "rlflow.rewards.ExactMatch"},
        },
    },
    "data": {"train": {"class_path": "rlflow.data.JSONL", "init_args": {"path": "rows.jsonl"}}, "prompts_per_step": 4},
    "trainer": {"run_dir": "runs/own", "max_steps": 2, "accelerator": "cpu"},
    "strategy": {"class_path": "rlflow.strategies.SingleProcess"},
    "rollout": {"class_path": "rlflow.rollout.TransformersEngine"},
}
ROWS = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
REMOVED = object()
TWO_RANKS = {"trainer.devices": 2, "strategy": REMOVED}
FILES = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "long.jsonl": json.dumps({"question": "1+1=", "answer": "2" * 2045}) + "\n",
    "my_algorithm.py": '''
from rlflow import PerSample, PerToken, Rollout, node
from rlflow.types import WithTexts
from rlflow.algorithms import GRPO


class ShortGRPO(GRPO):
    """GRPO that likes brevity."""

    @node
    def rewards(self, rollout: WithTexts) -> PerSample:
        brevity = -rollout.lengths.float()
        self.log("reward/brevity", brevity)
        return self.reward_function(rollout) + brevity


class Cyclic(GRPO):
    @node
    def rewards(self, advantages: PerSample) -> PerSample:
        return advantages


class WithoutInput(GRPO):
    @node
    def advantages(self, rollout: Rollout, rewrads: PerSample) -> PerSample:
        return rewrads


class WithoutRole(GRPO):
    @node(role="actr")
    def ref_logprobs(self, rollout: Rollout) -> PerToken:
        return rollout.logprobs
''',
    "my_rewards.py": """
import os
import signal
import time


def raises(response, row):
    raise KeyError("solution")


def nan(response, row):
    return float("nan")


def raises_on_rank_1(response, row):
    if os.environ.get("LOCAL_RANK") == "1":
        raise KeyError("solution")
    return 1.0


def exits(response, row):
    raise SystemExit(0)


def leaves(response, row):
    os._exit(0)


def returns_infinity_in_float32(response, row):
    return 1e308


def killed_on_rank_1(response, row):
    if os.environ.get("LOCAL_RANK") == "1":
        print(f"killed at {time.time()}", file=open("killed.txt", "w"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
""",
    "leaving_algorithm.py": "import sys\nfrom rlflow.algorithms import GRPO\nsys.exit(0)\n",
    "broken_algorithm.py": "import a_module_that_nobody_has\n",
    "not_json.jsonl": '{"question": "1+1=", "answer": "2"}\n{"question": 1+1=\n',
    "empty.jsonl": "",
    "not_a_model/readme.txt": "no weights here\n",
    "list.yaml": "- seed\n",
    "torn.yaml": "trainer: {max_steps: 1\n",
}


def make(folder: Path) -> None:
    """Write all files, and `my.yaml`."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    write(folder / "my.yaml")


def write(path: Path, changes: dict[str, Any] | None = None) -> None:
    """Write the config with the values at dotted keys changed, or taken out (`REMOVED`)."""
    config = copy.deepcopy(CONFIG)
    for key, value in (changes or {}).items():
        *above, last = key.split(".")
        place = config
        for step in above:
            place = place.setdefault(step, {})
        if value is REMOVED:
            del place[last]
        else:
            place[last] = value
    path.write_text(yaml.safe_dump(config))


def command(folder: Path, name: str, *arguments: str) -> None:
    """A command of `rlflow`, in this process and in `folder`, whose modules are forgotten afterwards.

    A run of several ranks needs processes that are ranks already, for a launcher starts the command of this process.
    """
    with forgotten(folder), contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        import_module(f"rlflow.commands.{name}").main(arguments)


@contextlib.contextmanager
def forgotten(folder: Path) -> Iterator[None]:
    """Within, modules of the folder may be imported; afterwards they are forgotten, as changes of `sys.path` are."""
    path, modules = [*sys.path], {*sys.modules}
    try:
        yield
    finally:
        sys.path[:] = path
        for made in {*sys.modules} - modules:
            if Path(vars(sys.modules[made]).get("__file__") or "").is_relative_to(folder):
                del sys.modules[made]


def rewarded_by(function: str) -> dict[str, Any]:
    """The change that scores by a function of `my_rewards.py`."""
    reward = {"class_path": "rlflow.rewards.CallableReward", "init_args": {"function": f"my_rewards.{function}"}}
    return {"module.init_args.reward": reward}
