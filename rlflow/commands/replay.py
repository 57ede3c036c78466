"""`rlflow replay`: nodes of a run's step once more, in one process, where a debugger can stop them."""

from __future__ import annotations

import pdb
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlflow.commands.configuration import config_parser, configured
from rlflow.commands.parser import OneLineParser, parsed_options
from rlflow.config.reading import read
from rlflow.errors import UserError, one_line
from rlflow.run.folder import RunFolder
from rlflow.run.replay import Replay

LEFT_OUT = ("placement", "logger", "callbacks", "config", "predict")
# Of any strategy, what SingleProcess computes with as well.
OF_STRATEGY = ("precision", "token_budget", "packing", "float32_head")
ALONE: dict[str, Any] = {"devices": 1, "num_nodes": 1, "max_staleness": 0, "partial_rollout": None, "ckpt_path": None}
ALONE |= {"keep_inputs": [], "keep_inputs_of": [], "fast_dev_run": False}
MEND = "bring the file back as the run wrote it"


@dataclass(frozen=True)
class ReplayCommand:
    """What is asked for."""

    asked: Replay

    def run(self) -> None:
        """Run the nodes; with the debugger, stop where each begins, and where one raises.

        Raises:
            UserError: The run has no config, or one that is damaged, or kept nothing of that step.
        """
        file = RunFolder(self.asked.run).config
        if not file.is_file():
            raise UserError(
                f"{self.asked.run} has no {file.name}; give the folder of a run that a config made, or replay from"
                " Python by `Trainer.replay`"
            )
        with tempfile.TemporaryDirectory(prefix="rlflow-replay-") as scratch:
            written = Path(scratch) / "config.yaml"
            written.write_text(yaml.safe_dump(alone(config_of(file), Path(scratch) / "run")))
            try:
                found = configured(config_parser("fit", ""), ["--config", str(written)])
            except UserError as error:
                raise UserError(f"{error} (the config of the run: {file})") from error
            try:
                found.trainer.replay(found.module, found.data, self.asked)
            except UserError:
                raise
            except Exception as error:
                if self.asked.debugs:
                    pdb.post_mortem(error.__traceback__)
                raise


def config_of(file: Path) -> dict[str, Any]:
    """The config that a run left.

    Raises:
        UserError: It cannot be read, or is none of a run.
    """
    what = f"the config of the run is {file}"
    try:
        found = read(file.read_text(encoding="utf-8"), what)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{what}, which cannot be read ({one_line(error)}); {MEND}") from error
    if not isinstance(found, dict):
        raise UserError(f"{what}, which holds no `key: value` lines but {found!r:.80}; {MEND}")
    found["strategy"] = found.get("strategy") or {}  # null is a run on one process
    for section in ("trainer", "strategy"):
        if not isinstance(found.get(section), dict):
            raise UserError(f"{what}, whose `{section}` is {found.get(section)!r:.80}, not what a run writes; {MEND}")
    if not isinstance(found["strategy"].get("init_args", {}), dict):
        raise UserError(f"{what}, whose `strategy.init_args` is no mapping; {MEND}")
    return found


def alone(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The config of a run on one process, which computes what that run does.

    Args:
        config: As the run resolved it.
        run_dir: For what a run writes.
    """
    given = config["strategy"].get("init_args", {})
    return {
        **{name: value for name, value in config.items() if name not in LEFT_OUT},
        "trainer": {**config["trainer"], **ALONE, "run_dir": str(run_dir)},
        "strategy": {
            "class_path": "rlflow.strategies.SingleProcess",
            "init_args": {name: value for name, value in given.items() if name in OF_STRATEGY},
        },
    }


def read_replay(arguments: Sequence[str]) -> ReplayCommand:
    """What `rlflow replay` runs."""
    parser = OneLineParser(
        prog="rlflow replay", description="Run nodes of a run's step once more, in one process.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run that kept inputs, see `trainer.keep_inputs`")
    parser.add_argument("--step", type=int, required=True, help="of the run, from 1")
    parser.add_argument("--node", type=str | None, default=None, help="its name; else all that were kept, in order")
    parser.add_argument("--pdb", action="store_true", help="stop in the debugger where each node begins or raises")
    parsed = parsed_options(parser, arguments)
    if parsed.step < 1:
        raise UserError(f"`--step` is {parsed.step}; steps count from 1")
    return ReplayCommand(Replay(Path(parsed.run_dir), parsed.step, parsed.node, parsed.pdb))
