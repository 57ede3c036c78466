"""Starts the ranks of one machine as Fabric does, and ends all of them when one dies, with its name."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from rlflow.errors import UserError
from rlflow.process import status
from rlflow.process.environment import place_kept
from rlflow.process.status import FOLDER_VARIABLE, PARENT_VARIABLE, SUPERVISED_VARIABLE, Status

POLL_S = 0.2
GRACE_S = 2.0  # how long rank 0 may still take to fail in its own words after another rank has died
END_S = 60.0  # how long the other ranks may outlive a rank 0 that is done
TOLD = 2  # the exit code of a rank that has said on the terminal what its user can mend


class RankLauncher(_SubprocessScriptLauncher):
    """Runs this script once more for every further rank of this machine, unless torchrun or Slurm started them.

    Use it as `fabric.launch(function)`. A rank that dies ends the others within 5 seconds: one line on the terminal
    names it and what it was doing, unless it has told of a `UserError` itself, and the exit code is its own (1 if that
    is 0, or a signal killed it). A rank that exits with code 0 before `function` has returned in it has died too. What
    `function` raises in rank 0 is rank 0's to report; the others are killed. Ranks of other machines learn of a death
    by their collectives failing.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks, then call the function; its result is rank 0's."""
        with place_kept():
            return self._launch(function, *args, **kwargs)

    def _launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        terminal = os.dup(2)  # where the user looks, whatever the ranks redirect later
        if environment.creates_processes_externally:
            status.report(environment.global_rank(), status.AT_FIRST)
            if PARENT_VARIABLE not in os.environ:
                return _to_its_end(function, *args, **kwargs)
            _follow(int(os.environ.pop(PARENT_VARIABLE)), environment.local_rank(), terminal)
            try:
                return _to_its_end(function, *args, **kwargs)
            except Exception:
                time.sleep(GRACE_S)  # rank 0 finds most of them too: it tells them once, and ends this process
                raise

        folder = Path(tempfile.mkdtemp(prefix="rlflow-ranks-"))
        os.environ |= {PARENT_VARIABLE: str(os.getpid()), FOLDER_VARIABLE: str(folder)}
        self._call_children_scripts()
        del os.environ[PARENT_VARIABLE], os.environ[FOLDER_VARIABLE]
        first = environment.node_rank() * self.num_processes
        watch = _Watch(
            {first + 1 + index: process for index, process in enumerate(self.procs)}, first, terminal, folder
        )
        return watch.over(function, *args, **kwargs)


def _to_its_end(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    status.end()
    return result


class _Watch(threading.Thread):
    """Waits in rank 0's process for another rank to die."""

    def __init__(
        self, ranks: dict[int, subprocess.Popen[bytes]], own_rank: int, terminal: int, status_folder: Path
    ) -> None:
        super().__init__(daemon=True, name="rank-watch")
        self._folder = status_folder
        self._statuses = {rank: Status.in_file(status_folder / str(rank - own_rank)) for rank in ranks}
        self._ranks = ranks
        self._own_rank = own_rank
        self._terminal = terminal
        self._over = threading.Event()

    def over(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.start()
        atexit.register(self._wait_for_all)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # Collectives fail here a moment after the rank that broke them, whose name is the better message.
            dead = None if isinstance(error, UserError) else self._await_death(GRACE_S / 2)
            self._end_all()
            if dead is None:
                raise
            self._report(dead)
            raise SystemExit(self._exit_code(dead)) from error
        except BaseException:
            self._end_all()
            raise

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            dead = self._dead()
            if dead is not None:
                if not self._over.wait(GRACE_S):  # rank 0 hangs: it waits for the dead
                    self._end_all()
                    self._report(dead)
                    os._exit(self._exit_code(dead))
                return

    def _dead(self) -> int | None:
        return next((rank for rank, process in self._ranks.items() if self._has_died(rank, process.poll())), None)

    def _has_died(self, rank: int, code: int | None) -> bool:
        return code is not None and (code != 0 or not self._statuses[rank].ended)

    def _await_death(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (dead := self._dead()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        return dead

    def _end_all(self) -> None:
        self._over.set()
        for process in self._ranks.values():
            process.kill()  # SIGTERM would not reach a rank that hangs in a collective
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + END_S
        for rank, process in self._ranks.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(self._terminal, f"rank {rank} has not ended {END_S:.0f} s after rank {self._own_rank}; killed it")
                process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        dead = self._dead()
        if dead is not None and not self._over.is_set():
            self._report(dead)
            os._exit(self._exit_code(dead))

    def _exit_code(self, rank: int) -> int:
        return max(1, self._ranks[rank].returncode)

    def _report(self, rank: int) -> None:
        status.end()  # of this process, whose exit code follows from what is said here
        code, last = self._ranks[rank].returncode, self._statuses[rank]
        if code != TOLD or not last.ended:
            _say(self._terminal, f"rank {rank} {last.ending(code)}; ended the other ranks")


def _follow(parent: int, local_rank: int, terminal: int) -> None:
    """End this process when the one that started it is gone."""
    supervised = os.environ.pop(SUPERVISED_VARIABLE, None) is not None

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        if local_rank == 1 and not supervised:  # one of them says it, where nobody else does
            _say(terminal, "rank 0 of this machine is gone without a word; ended the other ranks")
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _say(terminal: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not keep the ranks from ending
        os.write(terminal, f"{line}\n".encode(errors="replace"))
