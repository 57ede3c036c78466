"""Imported first: Ctrl-C while the command line is imported ends it in one line, which Python would not do.

`KeyboardInterrupt` that is raised within an import is a traceback, or is dropped where Python cannot raise it. Another
program that imports rlflow is left as it is.
"""

import os
import signal
import sys

CODE = 130  # as a shell has it of programs that SIGINT ended


def _is_command() -> bool:
    """Whether this process is `rlflow` or `python -m rlflow.cli`, whose package is imported before the name is set."""
    name = sys.argv[0] if sys.argv else ""
    return os.path.basename(name) == "rlflow" or (name == "-m" and "rlflow.cli" in sys.orig_argv)


def _end(*_: object) -> None:
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, b"rlflow: ended by SIGINT\n")
    finally:  # also where the terminal is gone
        os._exit(CODE)


def over() -> None:
    """From here on Ctrl-C is a `KeyboardInterrupt` again: who calls this reports it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
