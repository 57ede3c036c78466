"""The machine: memory, disk, folders, limits of processes, what isolates programs, and its GPUs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlflow.doctor.children import tried
from rlflow.doctor.finding import Finding, Machine, at_least

GB = 1e9
MEMORY_GB, DISK_GB, SCRATCH_GB = 4.0, 5.0, 1.0  # for a small model
SHARED_GB = 1.0  # NCCL and vLLM speak through it, with the ranks of a machine; a container has 0.064
FILES, FILES_OF_NODES = 1024, 8192
SHARED_MEMORY = Path("/dev/shm")
GPU_S = 60.0
# The driver is asked in a child: it would hold memory of each GPU, and a broken one may end the process.
GPU_FACTS = """
import json, torch
from rlflow.process.devices import cuda_of_driver, runs_on
facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": cuda_of_driver()}
if torch.cuda.is_available():
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    known = torch.cuda.get_arch_list()
    facts["gpus"] = [
        [torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory,
         runs_on(torch.cuda.get_device_capability(i), known)]
        for i in range(torch.cuda.device_count())
    ]
print(json.dumps(facts))
"""


def has_gpu() -> bool:
    """Whether a driver offers GPUs to this machine's processes; torch is not asked."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_count(folder: Path) -> int:
    """How many torch finds."""
    return len(_facts(folder)[0].get("gpus", ()))


def look(machine: Machine, folder: Path) -> Iterator[Finding]:
    """Of everything but packages and network.

    Args:
        machine: That is looked at.
        folder: Where children run.
    """
    yield from _memory()
    yield from _folders()
    yield from _limits(machine)
    yield _isolates()
    if machine.gpu:
        yield from _gpus(folder)
    yield _loopback()


def _memory() -> Iterator[Finding]:
    kilobytes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(kilobytes["MemAvailable"].split()[0]) * 1024 / GB
    cores = len(os.sched_getaffinity(0))
    yield at_least(
        f"{free:.1f} GB of memory free, {cores} cores",
        free,
        MEMORY_GB,
        f"a small run takes {MEMORY_GB:g} GB",
    )


def _folders() -> Iterator[Finding]:
    """Where a run writes."""
    cache = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    for name, folder, least, mend in (
        ("runs are written to", Path("runs"), DISK_GB, "give `trainer.run_dir` a folder on a disk with room"),
        ("scratch files to", _scratch(), SCRATCH_GB, "set TMPDIR to a folder on a disk with room"),
        ("models of the hub to", cache.expanduser(), 0.0, "set HF_HOME to a folder that you may write"),
    ):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        try:
            _write_in(there)
        except OSError as error:
            yield Finding(f"{name} {folder}: {error.strerror} ({there})", "broken", mend)
            continue
        free = shutil.disk_usage(there).free / GB
        yield at_least(f"{name} {folder}: {free:.1f} GB free", free, least, mend)


def _scratch() -> Path:
    """As Python chooses it; TMPDIR, if set, though Python passes over one that cannot be written."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def _write_in(folder: Path) -> None:
    file = folder / f".rlflow-doctor-{uuid4().hex}"
    try:
        file.write_bytes(b"1")
    finally:
        if folder.is_dir():
            file.unlink(missing_ok=True)


def _limits(machine: Machine) -> Iterator[Finding]:
    try:
        shared = shutil.disk_usage(SHARED_MEMORY).total / GB
    except OSError:
        shared = 0.0
    size = f"shared memory of {shared:.2f} GB ({SHARED_MEMORY})"
    yield at_least(size, shared, SHARED_GB, "start the container with --ipc=host or --shm-size=8g", machine.gpu)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "any number of" if files == resource.RLIM_INFINITY else f"{files:,}"
    least = FILES if machine.nodes == 1 else FILES_OF_NODES
    many = float("inf") if files == resource.RLIM_INFINITY else files
    yield at_least(f"{shown} open files (ulimit -n)", many, least, f"ulimit -n {FILES_OF_NODES}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    how_much = "unlimited" if unlimited else f"{locked / GB:.3f} GB of"
    what = f"{how_much} locked memory (ulimit -l), by which InfiniBand reads it"
    mend = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    yield Finding(what) if unlimited else Finding(what, "missing", mend, machine.nodes > 1 and machine.gpu)


def _isolates() -> Finding:
    from rlflow.worker.sandbox import why_not

    what = "programs of models can be isolated (user namespaces), for CodeReward and PythonTool"
    if not (problem := why_not()):
        return Finding(what)
    mend = "allow user namespaces: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0"
    return Finding(f"{what}: {problem}", "missing", mend, needed=False)


def _gpus(folder: Path) -> Iterator[Finding]:
    facts, why = _facts(folder)
    if why:
        yield Finding(f"torch was asked for GPUs: {why}", "broken", "make setup LOCK=cuda")
        return
    driver = "no driver" if facts["driver"] is None else "a driver for CUDA {}.{}".format(*facts["driver"])
    if facts["cuda"] is None:
        yield Finding(f"torch {facts['torch']} is built for the CPU", "broken", "make setup LOCK=cuda")
        return
    built = f"torch {facts['torch']} is built for CUDA {facts['cuda']}, and there is {driver}"
    if facts["driver"] is None or facts["driver"][0] < int(facts["cuda"].split(".")[0]):
        yield Finding(built, "broken", "install a newer NVIDIA driver; a container needs --gpus all")
        return
    yield Finding(built)
    if not facts.get("gpus"):
        yield Finding("torch finds no GPU", "broken", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
        return
    yield Finding(f"NCCL {facts['nccl']}")
    for number, (name, memory, known) in enumerate(facts["gpus"]):
        what = f"GPU {number}: {name}, {memory / GB:.0f} GB"
        mend = "install builds of torch and vLLM that know it, or choose others by CUDA_VISIBLE_DEVICES"
        yield Finding(what) if known else Finding(f"{what}, which torch has no kernels for", "broken", mend)
    for tool, why in (("nvcc", "kernels that vLLM builds late"), ("gcc", "kernels that Triton builds")):
        found = shutil.which(tool)
        what = f"{tool}, for {why}"
        mend = "install the CUDA toolkit" if tool == "nvcc" else "install a C compiler"
        needed = tool == "gcc"
        yield Finding(f"{what}: {found}") if found else Finding(what, "missing", mend, needed)


@cache
def _facts(folder: Path) -> tuple[dict[str, Any], str]:
    """What torch says of GPUs, or why it said nothing."""
    ran = tried(folder / "gpus", ["-c", GPU_FACTS], GPU_S)
    return (json.loads(ran.output.splitlines()[-1]), "") if ran.code == 0 else ({}, ran.why)


def _loopback() -> Finding:
    what = "ports of this machine's own address (127.0.0.1), by which ranks meet"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5):
                return Finding(what)
    except OSError as error:
        return Finding(f"{what}: {error}", "broken", "let a firewall or container pass 127.0.0.1")
