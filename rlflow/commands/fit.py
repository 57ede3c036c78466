"""`rlflow fit`: train a model as a config says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from rlflow.commands.configuration import Configured, config_parser, configured
from rlflow.process import startup
from rlflow.process.status import refusing_exits

HERE = "this machine"


def read_fit(arguments: Sequence[str]) -> Configured:
    """The objects that `rlflow fit` runs."""
    parser = config_parser("fit", "Train a model as a config says.")
    parser.add_argument(
        "--predict",
        type=str,
        nargs="?",
        const=HERE,
        default=None,
        metavar="HARDWARE",
        help="print what a step will take, and at the end how far that was off; on this machine, or as in `simulate`",
    )
    found, options = configured(parser, arguments)
    hardware = options.predict
    if hardware is None or not _is_first():
        return found
    from rlflow.commands.simulate import simulation_of_run

    return replace(found, simulation=simulation_of_run(found, None if hardware == HERE else hardware))


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow fit`."""
    startup.passed("imports")
    with refusing_exits():
        found = read_fit(arguments)
        startup.passed("config")
        found.fit()


def _is_first() -> bool:
    """Whether this process is the job's first, however it was started."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)
