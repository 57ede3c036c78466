"""The one kind of error that a user can mend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec


class UserError(ValueError):
    """What a user did and can mend, in one line: what was found, why it cannot work, what to do.

    The command line prints the message without a traceback and exits with 2.
    """


def require(module: str, what: str, *extras: str) -> None:
    """Refuse what needs a library that is not installed.

    Args:
        module: Of the library.
        what: Needs it.
        extras: Of rlflow's installation, each of which brings it.

    Raises:
        UserError: It is not installed.
    """
    if find_spec(module) is None:
        names = " or ".join(f"'rlflow-llm[{extra}]'" for extra in extras)
        raise UserError(f"{what} needs {module}, which is not installed; pip install {names}")


@contextmanager
def importable(module: str, what: str) -> Iterator[None]:
    """Around the import of a library that is installed: say in one line if it fails.

    Args:
        module: Of the library.
        what: Needs it.

    Raises:
        UserError: It does.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{what} needs {module}, which is installed and cannot be imported ({one_line(error)}); install it anew,"
            " in a version that fits the other packages"
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?` with the known name nearest to `name`, or nothing where none is near."""
    nearest = get_close_matches(name, known, n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else ""


def one_line(error: BaseException) -> str:
    """What another library's error says, in one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
