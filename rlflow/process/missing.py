"""Which rank the others wait for, as the statuses of a machine's ranks show it."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.process.status import LIMIT, WAITS, Status

SILENT_S = 5.0  # without a heartbeat


def missing(statuses: Sequence[Status]) -> str | None:
    """What is wrong with the rank that a collective failed for, in a line that begins with its name.

    One whose interpreter does not run, because it is stopped or C code of its task holds it; else one that does
    something while others wait.

    Args:
        statuses: Of the ranks that have begun, on this machine.

    Returns:
        None if the rank that is missing is none of these.
    """
    here = [status for status in statuses if not status.ended]
    if silent := [status for status in here if status.silent_s > SILENT_S]:
        return of_silence(max(silent, key=lambda status: status.silent_s))
    if not any(status.failed_s for status in here):
        return None
    absent = [status for status in here if not status.failed_s]
    late = [status for status in absent if not status.get(WAITS)] or absent
    if not late:
        return None
    return f"{late[0].named} did not join the other ranks within {_limit(late[0])}: it is at {late[0].doing}"


def of_silence(status: Status) -> str:
    """Of a rank whose interpreter does not run."""
    return (
        f"{status.named} has not answered for {status.silent_s:.0f} s ({status.doing}): it is stopped, or code in C"
        " holds its interpreter"
    )


def _limit(status: Status) -> str:
    seconds = status.get(LIMIT)
    return f"`timeout_s` ({seconds:g} s)" if seconds else "their time limit"
