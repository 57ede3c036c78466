"""Environment variables that processes pass to one another: their place in a job, and arguments."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflow.errors import UserError
from rlflow.process.status import PARENT_VARIABLE

# Fabric, DeepSpeed and vLLM set them for good.
PLACE = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE")
KERNELS = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
ARGUMENTS = "RLFLOW_ARGUMENTS"  # of a rank; they may hold secrets, and every user can read command lines

_takes_arguments = False


# Of a process that a launcher started, or that was told its machine by hand: torchrun, Slurm, LSF, MPI.
LAUNCHED = ("MASTER_ADDR", "NODE_RANK", "GROUP_RANK", "SLURM_JOB_ID", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE")


def require_started(world_size: int, num_nodes: int = 1) -> None:
    """Refuse a run of fewer or more ranks than torchrun has started: each would train alone, or wait.

    Args:
        world_size: Ranks of the run.
        num_nodes: Machines of the run.

    Raises:
        UserError: Torchrun started another number of processes, or nothing says which of several machines this is.
    """
    if num_nodes > 1 and not any(name in os.environ for name in LAUNCHED):
        raise UserError(
            f"`trainer.num_nodes` is {num_nodes}, and nothing says which machine this is; start the run by torchrun or"
            " srun on each machine, or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
        )
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and int(started) != world_size:
        raise UserError(
            f"torchrun started {started} processes, and `trainer.devices` x `trainer.num_nodes` is {world_size}; give"
            " `trainer.devices` the processes of a machine, and `trainer.num_nodes` the machines"
        )


def require_no_rank(devices: int) -> None:
    """Refuse a run of one rank in a rank of another run: that run started the script again from its start.

    Raises:
        UserError: This process is such a rank.
    """
    if devices == 1 and PARENT_VARIABLE in os.environ:
        raise UserError(
            "`trainer.devices` is 1, and a later run of this script has more, whose further ranks run the script from"
            " its start and would make this run again; give both the same `devices`, or make this run only `if"
            ' os.environ.get("LOCAL_RANK", "0") == "0"`'
        )


@contextmanager
def place_kept() -> Iterator[None]:
    """A context that restores a job's variables; else the next run in this process would wait as a rank of that job."""
    before = {name: os.environ[name] for name in PLACE if name in os.environ}
    try:
        yield
    finally:
        for name in PLACE:
            os.environ.pop(name, None)
        os.environ.update(before)


def keep_kernels_here() -> None:
    """Store compiled kernels on this machine's own disk, unless a variable says where.

    vLLM and Triton store them in the home folder, which machines of a cluster often share: hundreds of ranks would
    write there together. They go into the folder of temporary files, `/tmp/rlflow-kernels-1000` for the user 1000.
    """
    root = Path(tempfile.gettempdir()) / f"rlflow-kernels-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.lstat().st_uid == os.getuid():  # another user's kernels would run as this user's
        for variable, name in KERNELS.items():
            os.environ.setdefault(variable, str(root / name))


def take_arguments() -> None:
    """Set `sys.argv` to rank 0's arguments, in a rank that it started; called by a command before it reads them."""
    global _takes_arguments
    _takes_arguments = True
    handed_on = os.environ.pop(ARGUMENTS, None)
    if handed_on is not None:
        sys.argv[1:] = json.loads(handed_on)


@contextmanager
def handed_arguments() -> Iterator[None]:
    """A context in which ranks are started without arguments on their command lines, if `take_arguments` was called."""
    given = sys.argv
    if not _takes_arguments:
        yield
        return
    os.environ[ARGUMENTS] = json.dumps(given[1:])
    sys.argv = given[:2]  # with the command's name
    try:
        yield
    finally:
        sys.argv = given
        del os.environ[ARGUMENTS]
