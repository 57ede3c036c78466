"""The command line: `rlflow fit`, `validate`, `graph` and the other commands."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NoReturn

from rlflow.errors import Preempted, UserError, one_line, readable, shown
from rlflow.process import environment, preemption, startup, status, terminal
from rlflow.process.status import refusing_exits
from rlflow.process.supervisor import leave, supervise

# Heavy imports wait until a command is chosen, so that `rlflow --help` answers at once.


def fit(arguments: Sequence[str]) -> None:
    """Train a model as a config says."""
    from rlflow.commands.fit import read_fit

    startup.passed("imports")
    with refusing_exits():
        configured = read_fit(arguments)
        startup.passed("config")
        configured.fit()


def validate(arguments: Sequence[str]) -> None:
    """Measure a config's model on its held-out prompts."""
    from rlflow.commands.fit import read_validate

    with refusing_exits():
        configured = read_validate(arguments)
        configured.validate()


def graph(arguments: Sequence[str]) -> None:
    """Print an algorithm's graph and a rank's plan, draw it, or compare two algorithms."""
    from rlflow.commands.graph import read_graph

    read_graph(arguments).show()


def report(arguments: Sequence[str]) -> None:
    """Show where the time of a run's steps went, rank by rank."""
    from rlflow.commands.report import read_report

    read_report(arguments).show()


def trace(arguments: Sequence[str]) -> None:
    """Join the traces of a run's ranks into one file."""
    from rlflow.commands.trace import read_trace

    read_trace(arguments).write()


def samples(arguments: Sequence[str]) -> None:
    """Read the samples of a run: prompts and responses, conversations turn by turn."""
    from rlflow.commands.samples import read_shown

    read_shown(arguments).show()


def play(arguments: Sequence[str]) -> None:
    """Play the environment of a config in the terminal, as its policy would read it."""
    from rlflow.commands.play import read_play

    read_play(arguments).run()


def export(arguments: Sequence[str]) -> None:
    """Write the model of a run that trained adapters, merged or as an adapter."""
    from rlflow.commands.export import read_export

    read_export(arguments).run()


def simulate(arguments: Sequence[str]) -> None:
    """Predict a config's time, bytes and memory on machines that are not here."""
    if "--paper" in arguments:
        from rlflow.simulate.paper import show_paper

        show_paper(arguments)
        return
    from rlflow.commands.simulate import read_simulate
    from rlflow.simulate.report import show

    show(read_simulate(arguments))


def replay(arguments: Sequence[str]) -> None:
    """Run nodes of a run's step once more, in one process, with a debugger if asked."""
    from rlflow.commands.replay import read_replay

    read_replay(arguments).run()


def doctor(arguments: Sequence[str]) -> None:
    """Show what is installed and works here, what is missing, and how to mend it."""
    from rlflow.commands.doctor import read_doctor

    read_doctor(arguments).show()


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fit": fit,
    "validate": validate,
    "graph": graph,
    "report": report,
    "trace": trace,
    "samples": samples,
    "play": play,
    "export": export,
    "simulate": simulate,
    "replay": replay,
    "doctor": doctor,
}
RUNS = ("fit", "validate")
INTERRUPTED_CODE = 130  # as a shell has it of programs that SIGINT ended
PIPE_CODE = 141  # as a shell has it of programs that SIGPIPE ended
_FORGED = re.compile(r"^(?=rlflow\b)")  # of a line in an error's text that looks like one of ours


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; write `rlflow COMMAND --config FILE`, see `rlflow --help`")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 2 and one line for what the user can mend, with 1 and a last line for a fault.

    A run that a signal ends exits with 3, and with a line that says how to continue.

    A run that is given on the command line has a process of its own, whose parent sees to it that the exit code is 0
    only if the run came to its end.

    Args:
        arguments: Instead of those of the command line; they are run in this process.
    """
    of_process = arguments is None
    if of_process:
        environment.take_arguments()
    parser = _OneLineParser(
        prog="rlflow",
        description="Reinforcement-learning post-training of language models, without a central node.",
        epilog="`rlflow COMMAND --help` lists what a command takes.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=function.__doc__, add_help=False)
    is_run = False
    try:
        sys.path.insert(0, _here())  # a user's own `my_algorithm.py` lies beside the config
        chosen, rest = parser.parse_known_args(arguments)
        is_run = of_process and chosen.command in RUNS
        startup.begin(of_process=is_run)
        if is_run:
            terminal.outlast()
            supervise()
        status.begin()
        with preemption.handled(of_process) if chosen.command == "fit" else nullcontext():
            COMMANDS[chosen.command](rest)
        sys.stdout.flush()
        status.end()
        if is_run:
            leave(0)
    except SystemExit as error:  # the command has answered, or the launcher has reported a rank that died
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        status.end(code)
        if is_run:
            leave(code)
        raise
    except Preempted as error:
        if status.is_first():
            _tell(f"rlflow: {error}")
        _end(preemption.EXIT_CODE, is_run)
    except UserError as error:
        _tell(f"rlflow: error: {error}{_notes(error)}")
        _end(2, is_run)
    except KeyboardInterrupt as error:
        _tell(f"rlflow: ended by SIGINT{_notes(error)}")
        _end(INTERRUPTED_CODE, is_run)
    except BaseException as error:
        if of_process and not is_run and isinstance(error, BrokenPipeError):  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest at its end
            _end(PIPE_CODE, is_run)
        _tell(traceback.format_exc().rstrip("\n"))
        _tell(f"rlflow: {type(error).__name__}: {one_line(error)}{_notes(error)}")
        _end(1, is_run)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UserError("the folder that the command was started in is gone; change to one that is there") from error


def _notes(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _tell(text: str) -> None:
    """A line for the terminal, on which what came from data or a config can do nothing but be read."""
    first, *more = readable(shown(text)).split("\n")
    print("\n".join([first, *(_FORGED.sub("  ", line) for line in more)]), file=sys.stderr)


def _end(code: int, is_run: bool) -> None:
    status.end(code)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if is_run:
            leave(code)
        sys.exit(code)
    # Taking torch down closes the connections long before the process is gone, and rank 0 would report those.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
