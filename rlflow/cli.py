"""The command line: `rlflow fit`, `validate`, `graph` and the other commands."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import NoReturn

from rlflow.errors import Preempted, UserError, did_you_mean, one_line, readable, shown
from rlflow.process import environment_variables, preemption, startup, status, terminal
from rlflow.process.supervisor import leave, supervise

# What each command does, by its name. `rlflow.commands.<name>`, which runs it, is imported when it is chosen, so that
# `rlflow --help` answers quickly.
COMMANDS = {
    "init": "Write a folder with an algorithm, a reward, data, a config and a test, ready to train.",
    "fit": "Train a model as a config says.",
    "validate": "Measure a config's model on its held-out prompts.",
    "test": "Score a config's model on held-out prompts: avg@k, pass@k, with intervals.",
    "predict": "Write a config's model's responses to prompts as JSON Lines.",
    "check": "Say what changes an algorithm's gradient and should not: ranks, micro-batches, padding, order.",
    "graph": "Print an algorithm's graph and a rank's plan, and draw it.",
    "report": "Show where the time of a run's steps went, rank by rank; with `--html` the run as a page.",
    "trace": "Join the traces of a run's ranks into one file.",
    "samples": "Read the samples of a run: prompts and responses, conversations turn by turn.",
    "play": "Play the environment of a config in the terminal, as its policy would read it.",
    "export": "Write the model of a run or of a checkpoint, merged or as an adapter, in bf16 or fp32.",
    "simulate": "Predict a config's time, bytes and memory on machines that are not here.",
    "conform": "Say whether a loss, advantages or logprobs are an algorithm's, and what differs if not.",
    "replay": "Run nodes of a run's step once more, in one process, with a debugger if asked.",
    "doctor": "Show what is installed and works here, what is missing, and how to fix it.",
}
RUNS = ("fit", "validate", "test", "predict")
INTERRUPTED_CODE = 130  # as a shell has it of programs that SIGINT ended
PIPE_CODE = 141  # as a shell has it of programs that SIGPIPE ended
_UNKNOWN = re.compile(r"invalid choice: '(.*)' \(choose from")  # of argparse, for a command
_FORGED = re.compile(r"^(?=rlflow\b)")  # of a line in an error's text that looks like one of ours


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if unknown := _UNKNOWN.search(message):
            nearest = did_you_mean(unknown[1], COMMANDS)
            message = f"rlflow has no command {unknown[1]!r}.{nearest}"
            raise UserError(f"{message} Write `rlflow COMMAND --config FILE`, see `rlflow --help`")
        raise UserError(f"{message}; write `rlflow COMMAND --config FILE`, see `rlflow --help`")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 2 and one line for what the user can fix, with 1 and a last line for a fault.

    A run that a signal ends exits with 3, and with a line that says how to continue.

    A run that is started on the command line has a process of its own. The parent of that process exits with 0 only if
    the run came to its end.

    Args:
        arguments: Arguments in place of the command line's; they are run in this process.
    """
    of_process = arguments is None
    if of_process:
        environment_variables.take_arguments()
        os.environ.pop("MPLBACKEND", None)  # a notebook's, whose environment may be another; rlflow draws into files
    parser = _OneLineParser(
        prog="rlflow",
        description="Reinforcement-learning post-training of language models, without a central node.",
        epilog="`rlflow COMMAND --help` lists what a command takes.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    is_run = False
    try:
        sys.path.insert(0, _here())  # where a user's own `my_algorithm.py` is
        chosen, rest = parser.parse_known_args(arguments)
        is_run = of_process and chosen.command in RUNS
        startup.begin(of_process=is_run)
        if is_run:
            terminal.outlast()
            supervise()
        status.begin()
        with preemption.handled(of_process) if chosen.command == "fit" else nullcontext():
            import_module(f"rlflow.commands.{chosen.command}").main(rest)
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
            _print_error(f"rlflow: {error}")
        _end(preemption.EXIT_CODE, is_run)
    except UserError as error:
        _print_error(f"rlflow: error: {error}{_notes(error)}")
        _end(2, is_run)
    except KeyboardInterrupt as error:
        _print_error(f"rlflow: ended by SIGINT{_notes(error)}")
        _end(INTERRUPTED_CODE, is_run)
    except BaseException as error:
        if of_process and not is_run and isinstance(error, BrokenPipeError):  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest at its end
            _end(PIPE_CODE, is_run)
        _print_error(traceback.format_exc().rstrip("\n"))
        _print_error(f"rlflow: {type(error).__name__}: {one_line(error)}{_notes(error)}")
        _end(1, is_run)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UserError("the folder that the command was started in is gone; change to one that is there") from error


def _notes(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def _print_error(text: str) -> None:
    """Print a text on the terminal; control characters and forged lines from data or a config have no effect."""
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
