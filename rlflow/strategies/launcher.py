"""Starts the ranks of one machine as Fabric does; when a rank dies, reports it and ends all others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from rlflow.databuffer.transport import of_a_collective
from rlflow.errors import Preempted, UserError
from rlflow.process import preemption, status, supervisor
from rlflow.process.environment_variables import PLACE, handed_arguments, place_kept
from rlflow.process.status import BOARD_VARIABLE, PARENT_VARIABLE, CommandExit

POLL_S = 0.2
GRACE_S = 2.0  # seconds that rank 0 has, after another rank has died, to raise an error of its own
MISSING_S = 10.0  # seconds that a rank whose collective failed waits for a process that knows which rank was missing
END_S = 60.0  # seconds that other ranks have to end after rank 0 is done
REPORTED = 2  # the exit code of a rank that has reported a `UserError` on the terminal

_watch: _Watch | None = None  # of the ranks that this process started; later runs of its script are theirs too
_by_rank_0 = False  # whether this machine's rank 0 started this process


class RankLauncher(_SubprocessScriptLauncher):
    """Runs this script once more for every further rank of this machine, unless torchrun or Slurm started them.

    Use it as `fabric.launch(function)`. If a rank dies, the others end within 5 seconds. One line on the terminal names
    the rank and what it was doing, unless the rank has reported a `UserError` itself:

        rank 1 on gpu-17 was killed by SIGKILL (step 3, run rewards: ranks 0-1); ended the other ranks; continue with
        `--trainer.ckpt_path last`, after step 2

    The exit code is that of the rank that died, but 1 if that is 0 or a signal killed the rank. A rank that exits with
    code 0 before `function` has returned in it has died too. If a collective fails, the line names the rank of this
    machine that did not join it. If `function` raises in rank 0, the other ranks are killed, and rank 0's caller
    reports the error. If rank 0 is killed, only the parent process of `rlflow fit` and `validate` reports it. Ranks of
    other machines notice a death when their collectives fail.
    """

    @property
    def is_interactive_compatible(self) -> bool:
        """True: one rank can run in a notebook. More are refused when they would be started."""
        return True

    @place_kept()
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks, unless they are started already, then call the function and return its result.

        Every rank runs the same script, so every rank calls this, and the ranks of one run make the next run too. The
        result is that of this process.

        Raises:
            CommandExit: In rank 0, if another rank died or did not join a collective. A line on the terminal names it.
            UserError: There are several ranks, and this process has no command that could be run again.
        """
        global _watch, _by_rank_0  # of the process, as its ranks are
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        status.start_heartbeat()
        status.saved(0)
        if environment.creates_processes_externally:
            status.report(environment.global_rank(), status.AT_FIRST)
            parent = os.environ.pop(PARENT_VARIABLE, None)
            if parent is not None:
                supervisor.die_with(int(parent))
                _by_rank_0 = True
            return _started(function, *args, **kwargs)

        if _watch is not None and self.num_processes > 1:
            if _watch.has_ended:
                raise UserError(
                    "an earlier run of this script failed, which ended its other ranks; start the script again"
                )
            return _watch.over(function, *args, **kwargs)
        if self.num_processes > 1:
            require_command(self.num_processes)
        os.environ |= {PARENT_VARIABLE: str(os.getpid()), BOARD_VARIABLE: str(status.board().path)}
        with handed_arguments():
            self._call_children_scripts()
        del os.environ[PARENT_VARIABLE], os.environ[BOARD_VARIABLE]
        first = environment.node_rank() * self.num_processes
        watch = _Watch({first + 1 + index: process for index, process in enumerate(self.procs)}, first)
        if self.procs:
            _watch = watch
        return watch.over(function, *args, **kwargs)


def require_command(devices: int) -> None:
    """Refuse to start ranks if this process has no command to run again: in a notebook, at a prompt, by `python -c`.

    Raises:
        UserError: This process was not started by `python FILE`, `python -m MODULE` or an installed script.
    """
    is_module = sys.modules["__main__"].__spec__ is not None
    if hasattr(sys, "ps1") or not (is_module or Path(sys.argv[0]).is_file()):
        raise UserError(
            f"`trainer.devices` is {devices}, and each further rank runs this process's command again, which a notebook"
            " cell, a prompt or `python -c` does not have (and a fork hangs in OpenMP's threads); write the code to a"
            " file, such as by `%%writefile my_run.py`, and run `python my_run.py`, or set `devices=1`"
        )


def _started(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function in a rank that another process started: this machine's rank 0, torchrun or Slurm.

    If rank 0 started this rank, an error is raised a few seconds late: rank 0 often has the same error, reports it and
    ends this rank.
    """
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        if of_a_collective(error):
            status.failed()
            if not _by_rank_0:
                named = status.mine().named
                error.add_note(f"{named} waited for another rank, which is gone or did not join it in time")
        if _by_rank_0:  # rank 0 has most errors too: it reports them once, and ends this process
            time.sleep(MISSING_S if status.mine().failed else GRACE_S)
        raise
    status.end()
    return result


class _Watch(threading.Thread):
    """A thread of rank 0 that polls the processes of this machine's other ranks, and ends all when one has died.

    Args:
        ranks: Processes that rank 0 started, by global rank.
        own_rank: Global rank of this process, the first of its machine.
    """

    def __init__(self, ranks: dict[int, subprocess.Popen[bytes]], own_rank: int) -> None:
        super().__init__(daemon=True, name="rank-watch")
        self._board = status.board()
        self._place = {name: os.environ[name] for name in PLACE if name in os.environ}
        self._statuses = {rank: self._board[rank - own_rank] for rank in ranks}
        self._ranks = ranks
        self._own_rank = own_rank
        self._terminal = os.dup(2)  # the terminal, even if ranks redirect their output later
        self._over = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the other ranks were ended, as a run failed."""
        return self._over.is_set()

    def over(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function in rank 0 while the other ranks are watched, and return its result.

        If an error in rank 0 follows from another rank's death, that rank is reported, and `CommandExit` is raised.
        """
        if self.ident is None:
            self.start()
            supervisor.before(self._wait_for_all)
        else:  # another run of the same ranks
            os.environ |= self._place
            for each in self._statuses.values():
                each.write(each.rank, status.AT_FIRST)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            # Collectives fail here a moment after the rank that broke them; a message that names that rank is better.
            dead = None if isinstance(error, UserError) else self._await_death(GRACE_S / 2)
            absent = None
            if dead is None and of_a_collective(error):
                status.failed()
                absent = self._board.missing()
            self._end_all()
            if dead is not None:
                raise CommandExit(self._reported(dead)) from error
            if absent is None:
                raise
            _say(self._terminal, f"{absent}; ended the other ranks{self._board.resume_advice}")
            raise CommandExit(1) from error
        except BaseException:
            self._end_all()
            raise

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            dead = self._dead()
            if dead is not None:
                if not self._over.wait(GRACE_S):  # rank 0 hangs in a collective with the dead rank
                    self._end_all()
                    os._exit(self._reported(dead))
                return

    def _dead(self) -> int | None:
        """A rank whose process ended before its run did; None if there is none."""
        for rank, process in self._ranks.items():
            code = process.poll()
            asked = code == preemption.EXIT_CODE and preemption.received()  # all ranks end so, rank 0 last
            if code is not None and not asked and (code != 0 or not self._statuses[rank].ended):
                return rank
        return None

    def _await_death(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (dead := self._dead()) is None and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        return dead

    def _end_all(self) -> None:
        self._over.set()
        for process in self._ranks.values():
            process.kill()  # SIGTERM would not reach a rank that hangs in a collective

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + END_S
        for rank, process in self._ranks.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _say(self._terminal, f"rank {rank} has not ended {END_S:.0f} s after rank {self._own_rank}; killed it")
                process.kill()
        dead = self._dead()
        if dead is not None and not self._over.is_set():
            os._exit(self._reported(dead))

    def _reported(self, rank: int) -> int:
        """Report on the terminal how a rank died, unless it has done so itself; return rank 0's exit code, not 0."""
        code, last = self._ranks[rank].returncode, self._statuses[rank]
        if code == preemption.EXIT_CODE and last.ended:
            _say(self._terminal, f"rlflow: rank {rank} was asked to end by a signal; {Preempted.GO_ON_FROM_BEFORE}")
        elif code != REPORTED or not last.ended:
            absent = self._board.missing() if last.failed else None
            said = absent or f"rank {rank} on {socket.gethostname()} {last.ending(code)}"
            _say(self._terminal, f"{said}; ended the other ranks{self._board.resume_advice}")
        status.end(max(1, code))
        return max(1, code)


def _say(terminal: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not keep the ranks from ending
        os.write(terminal, f"{line}\n".encode(errors="replace"))
