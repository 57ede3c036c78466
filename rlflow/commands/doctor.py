"""`rlflow doctor`: what is installed and works here, what is missing, and how to fix it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from rlflow.doctor import checks
from rlflow.doctor.checks import Finding
from rlflow.doctor.trials import trials
from rlflow.errors import UserError
from rlflow.process.status import CommandExit


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow doctor`: print a line for each thing, and end with code 0 if all that runs need works, else 1."""
    example = "example: rlflow doctor --quick"
    parser = _Parser(prog="rlflow doctor", description=__doc__, epilog=example, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="try nothing: no ranks, steps or engines")
    parser.add_argument(
        "--accelerator",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="what runs use; else GPUs where there are",
    )
    parser.add_argument("--num_nodes", type=int, default=None, help="machines of a run; else as Slurm or torchrun say")
    parser.add_argument("--timeout_s", type=float, default=120.0, help="seconds that each trial may take")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="leave the trials' files here")
    given = parser.parse_args(list(arguments))
    nodes = checks.nodes_here() if given.num_nodes is None else given.num_nodes
    for name, value in (("--num_nodes", nodes), ("--timeout_s", given.timeout_s)):
        if not value >= 1:
            raise UserError(f"`{name}` is {value}; give 1 or more")
    gpu = checks.has_gpu() if given.accelerator == "auto" else given.accelerator == "cuda"
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlflow-doctor-") as temporary:
        folder = Path(tempfile.mkdtemp(dir=given.keep.absolute()) if given.keep else temporary)
        found = _shown("packages", checks.packages(gpu, folder))
        found += _shown("this machine", checks.this_machine(gpu, nodes, folder))
        found += _shown("many machines", checks.many_machines(gpu, nodes))
        if not given.quick:
            found += _shown("tried", trials(gpu, folder, given.timeout_s))
    failing = [finding for finding in found if finding.fails]
    for finding in failing:
        print(f"needed: {finding}")
    here = f"{'GPUs' if gpu else 'the CPU'}, {nodes} machine(s)"
    print(f"{len(failing)} of {len(found)} need fixing" if failing else f"all that runs need works ({here})")
    raise CommandExit(1 if failing else 0)


class _Parser(argparse.ArgumentParser):
    """Python's own parser, as the parser of other commands may be among what is missing."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `rlflow doctor --help`")


def _shown(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print the findings of a section as they come, and return them."""
    print(title)
    found = []
    for finding in findings:
        print(f"  {finding}", flush=True)
        found.append(finding)
    return found
