"""What runs of several machines need: who they are, by what they meet, and by what they speak."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from rlflow.doctor.finding import Finding, Machine

INFINIBAND = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
RANK_NAMES = ("NODE_RANK", "GROUP_RANK", "SLURM_NODEID")


def nodes_here() -> int:
    """The machines that the launcher of this process speaks of: Slurm, or torchrun; 1 without one."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "GROUP_WORLD_SIZE"):
        if (text := os.environ.get(name, "")).isdigit():
            return max(1, int(text))
    return 1


def look(machine: Machine) -> Iterator[Finding]:
    """Of the network and the launcher's variables."""
    needed = machine.nodes > 1
    slurm = "SLURM_JOB_ID" in os.environ
    yield _launcher(slurm, needed)
    yield from _meeting(slurm, needed)
    yield _own_name(needed)
    yield from _interfaces()
    yield from _infiniband(needed and machine.gpu)


def _launcher(slurm: bool, needed: bool) -> Finding:
    if slurm:
        named = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_NODELIST")
        lacks = [name for name in named if name not in os.environ]
        what = "Slurm's variables of a task"
        return (
            Finding(what)
            if not lacks
            else Finding(f"{what}: no {', '.join(lacks)}", "missing", "start by srun", needed)
        )
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
        if lacks and not given.startswith("^"):
            yield Finding(f"{name}={given}: no {lacks[0]} here", "broken", f"give one of {', '.join(there)}")
        else:
            yield Finding(f"{name}={given}")


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
        yield Finding(what) if active else Finding(what, "missing", mend, needed and asked)
