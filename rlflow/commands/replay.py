"""`rlflow replay`: runs nodes of a past step again, in one process, where a debugger can stop them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from pdb import post_mortem
from typing import Any

from rlflow.commands.fit import read_fit
from rlflow.commands.parser import call
from rlflow.config.command_line import as_yaml, read
from rlflow.errors import UserError, one_line
from rlflow.run.folder import RunFolder
from rlflow.strategies.precision import own_name

LEFT_OUT = ("placement", "logger", "callbacks", "config", "predict")
# Settings of any strategy that SingleProcess computes with as well.
OF_STRATEGY = ("precision", "token_budget", "packing", "share_prefixes", "float32_head")
ALONE: dict[str, Any] = {"devices": 1, "num_nodes": 1, "max_staleness": 0, "partial_rollout": None, "ckpt_path": None}
ALONE |= {"dump_steps": [], "dump_nodes": [], "fast_dev_run": False, "precision": None}
FIX = "bring the file back as the run wrote it"


def replay(run_dir: Path, /, *, step: int, node: str | None = None, pdb: bool = False) -> None:
    """Run nodes of a step of a past run again, in one process.

    Example:
        rlflow replay runs/mine --step 200 --node advantages --pdb

    Args:
        run_dir: The folder of a run that stored inputs, see `trainer.dump_steps`.
        step: Step of the run, from 1.
        node: Name of the node; else all nodes whose inputs were stored, in order.
        pdb: Stop in the debugger where each node begins or raises.

    Raises:
        UserError: The run has no config, or one that is damaged, or stored nothing of that step.
    """
    if step < 1:
        raise UserError(f"`--step` is {step}; steps count from 1")
    file = RunFolder(run_dir).config
    if not file.is_file():
        raise UserError(
            f"{run_dir} has no {file.name}; give the folder of a run that a config made, or replay from Python by"
            " `Trainer.replay`"
        )
    with tempfile.TemporaryDirectory(prefix="rlflow-replay-") as scratch:
        written = Path(scratch) / "config.yaml"
        written.write_text(as_yaml(alone(config_of(file), Path(scratch) / "run")))
        try:
            found = read_fit(["--config", str(written)])
        except UserError as error:
            raise UserError(f"{error} (the config of the run: {file})") from error
        try:
            found.trainer.replay(found.module, found.data, run_dir, step, node, debug=pdb)
        except UserError:
            raise
        except Exception as error:
            if pdb:
                post_mortem(error.__traceback__)
            raise


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow replay`."""
    call(replay, arguments)


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
        raise UserError(f"{what}, which cannot be read ({one_line(error)}); {FIX}") from error
    if not isinstance(found, dict):
        raise UserError(f"{what}, which holds no `key: value` lines but {found!r:.80}; {FIX}")
    found["strategy"] = found.get("strategy") or {}  # null is a run on one process
    for section in ("trainer", "strategy"):
        if not isinstance(found.get(section), dict):
            raise UserError(f"{what}, whose `{section}` is {found.get(section)!r:.80}, not what a run writes; {FIX}")
    if not isinstance(found["strategy"].get("init_args", {}), dict):
        raise UserError(f"{what}, whose `strategy.init_args` is not a mapping; {FIX}")
    return found


def alone(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A run's config, changed so that one process computes what the run does.

    Args:
        config: Config as the run resolved it.
        run_dir: Folder for the files of the run.
    """
    given = config["strategy"].get("init_args", {})
    if (precision := config["trainer"].get("precision")) is not None:
        given = {**given, "precision": own_name(precision)}
    return {
        **{name: value for name, value in config.items() if name not in LEFT_OUT},
        "trainer": {**config["trainer"], **ALONE, "run_dir": str(run_dir)},
        "strategy": {
            "class_path": "rlflow.strategies.SingleProcess",
            "init_args": {name: value for name, value in given.items() if name in OF_STRATEGY},
        },
    }
