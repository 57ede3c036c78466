"""The command line: `rlflow fit`, `rlflow graph`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from rlflow.errors import UserError

# Heavy imports wait until a command is chosen, so that `rlflow --help` answers at once.


def fit(arguments: Sequence[str]) -> None:
    """Train a model as a config says."""
    from rlflow.configuration import read_fit

    configured = read_fit(arguments)
    configured.trainer.fit(configured.module, configured.data)


def graph(arguments: Sequence[str]) -> None:
    """Print an algorithm's graph and a rank's plan; draw it as Mermaid and SVG."""
    from rlflow.configuration import read_graph

    read_graph(arguments).show()


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"fit": fit, "graph": graph}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 2 and one line for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="rlflow",
        description="Reinforcement-learning post-training of language models, without a central node.",
        epilog="`rlflow COMMAND --help` lists what a command takes.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=function.__doc__, add_help=False)
    chosen, rest = parser.parse_known_args(arguments)
    sys.path.insert(0, os.getcwd())  # a user's own `my_algorithm.py` lies beside the config
    try:
        COMMANDS[chosen.command](rest)
    except UserError as error:
        print(f"rlflow: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
