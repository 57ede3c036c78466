"""The command line: `rlflow fit`, `validate`, `graph`, `report`, `trace`, `export`, `simulate`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from rlflow.errors import UserError, one_line
from rlflow.loggers.secrets import text_without_secrets, without_shapes
from rlflow.process import startup, status
from rlflow.process.status import refusing_exits
from rlflow.process.supervisor import supervise

# Heavy imports wait until a command is chosen, so that `rlflow --help` answers at once.


def fit(arguments: Sequence[str]) -> None:
    """Train a model as a config says."""
    from rlflow.commands.configuration import read_fit

    startup.passed("imports")
    with refusing_exits():
        configured = read_fit(arguments)
    startup.passed("config")
    configured.fit()


def validate(arguments: Sequence[str]) -> None:
    """Measure a config's model on its held-out prompts."""
    from rlflow.commands.configuration import read_validate

    with refusing_exits():
        configured = read_validate(arguments)
    configured.validate()


def graph(arguments: Sequence[str]) -> None:
    """Print an algorithm's graph and a rank's plan, draw it, or compare two algorithms."""
    from rlflow.commands.configuration import read_graph

    read_graph(arguments).show()


def report(arguments: Sequence[str]) -> None:
    """Show where the time of a run's steps went, rank by rank."""
    from rlflow.commands.configuration import read_report

    read_report(arguments).show()


def trace(arguments: Sequence[str]) -> None:
    """Join the traces of a run's ranks into one file."""
    from rlflow.commands.configuration import read_trace

    read_trace(arguments).write()


def export(arguments: Sequence[str]) -> None:
    """Write the model of a run that trained adapters, merged or as an adapter."""
    from rlflow.commands.configuration import read_export

    read_export(arguments).run()


def simulate(arguments: Sequence[str]) -> None:
    """Predict a config's time, bytes and memory on machines that are not here."""
    if "--paper" in arguments:
        from rlflow.simulate.paper import read_paper

        read_paper(arguments).show()
        return
    from rlflow.commands.configuration import read_simulate

    read_simulate(arguments).show()


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "graph": graph,
    "report": report,
    "trace": trace,
    "export": export,
    "simulate": simulate,
}
RUNS = ("fit", "validate")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; write `rlflow COMMAND --config FILE`, see `rlflow --help`")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 2 and one line for what the user can mend, with 1 and a last line for a fault.

    A run that is given on the command line has a process of its own, whose parent sees to it that the exit code is 0
    only if the run came to its end.

    Args:
        arguments: Instead of those of the command line; they are run in this process.
    """
    parser = _OneLineParser(
        prog="rlflow",
        description="Reinforcement-learning post-training of language models, without a central node.",
        epilog="`rlflow COMMAND --help` lists what a command takes.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=function.__doc__, add_help=False)
    sys.path.insert(0, os.getcwd())  # a user's own `my_algorithm.py` lies beside the config
    try:
        chosen, rest = parser.parse_known_args(arguments)
        startup.begin(of_process=arguments is None and chosen.command in RUNS)
        if arguments is None and chosen.command in RUNS:
            supervise()
        status.begin()
        COMMANDS[chosen.command](rest)
        status.end()
    except SystemExit:  # the command has answered, or the launcher has told of a rank that died
        status.end()
        raise
    except UserError as error:
        _tell(f"rlflow: error: {error}")
        _end(2)
    except Exception as error:
        print(without_shapes(traceback.format_exc()), end="", file=sys.stderr)
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        _tell(f"rlflow: {type(error).__name__}: {one_line(error)}{notes}")
        _end(1)


def _tell(text: str) -> None:
    print(text_without_secrets(text), file=sys.stderr)


def _end(code: int) -> None:
    status.end()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.exit(code)
    # Taking torch down closes the connections long before the process is gone, and rank 0 would report those.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
