"""A tool that runs Python programs of the policy in a sandbox."""

from __future__ import annotations

from functools import cache

from rlflow.worker import Limits, Sandbox


class PythonTool:
    """An environment, or a base of one, with the tool `python`. Each program runs in a sandbox of its own.

    A program sees no network, no files but Python's and those that it writes itself, and no processes but its own;
    nothing is left of it for the next one. See `rlflow.worker.Sandbox`.

    Args:
        timeout_s: Seconds that a program may take.
        memory_mb: Memory that each of its processes may take, in MB; in a worker at most the worker's.
        output_kb: Kilobytes of its output that the policy reads, from the beginning.

    Raises:
        UserError: This system cannot isolate a program.
    """

    def __init__(self, timeout_s: float = 5.0, memory_mb: int = 512, output_kb: int = 2) -> None:
        self._timeout_s = timeout_s
        self._sandbox = Sandbox(Limits(timeout_s=timeout_s, memory_mb=memory_mb, output_kb=output_kb))

    @classmethod
    def check_system(cls) -> None:
        """Refuse, before a run, a system that cannot isolate a program."""
        Sandbox(Limits())

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: The program. It starts from nothing each time, and has no network.
        """
        ran = self._sandbox.run(code)
        if ran.timed_out:
            return f"{ran.output}the program took longer than {self._timeout_s:g} s and was ended"
        if ran.succeeded:
            return ran.output or "the program printed nothing"
        why = ran.errors.strip().splitlines()
        return ran.output + (why[-1] if why else f"the program ended with code {ran.code}")


@cache
def _with_defaults() -> PythonTool:
    return PythonTool()


def python(code: str) -> str:
    """Run a Python program and read what it prints.

    Args:
        code: The program. It starts from nothing each time, and has no network.
    """
    return _with_defaults().python(code)


python.check_system = PythonTool.check_system  # type: ignore[attr-defined]
