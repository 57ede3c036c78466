"""The processes of a run: how Fabric's strategies start them, and how they find each other."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rlflow.databuffer.transport import connect_when_used
from rlflow.errors import UserError
from rlflow.process.environment_variables import keep_kernels_here
from rlflow.process.local_socket import listening
from rlflow.strategies.launcher import RankLauncher

POLL_S = 0.05
CALL = "rlflow/call"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OneProcess(SingleDeviceStrategy):
    """A run in this process alone."""

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """None; Fabric sets the devices of strategies that have this property."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise UserError(
                f"`trainer.devices` is {len(devices)}; SingleProcess runs 1. For more use `strategy: deepspeed` or"
                " `strategy: fsdp`."
            )
        self._root_device = devices[0]


class ManyProcesses(DDPStrategy):
    """A process for each rank, in one process group.

    Args:
        timeout: Timeout of the group's collectives.
        before_joining: Function that each rank calls before it joins, when its device is known.
    """

    def __init__(self, timeout: timedelta, before_joining: Callable[[], None]) -> None:
        super().__init__()
        self._joins_within = timeout
        self._before_joining = before_joining

    @property
    def launcher(self) -> RankLauncher:
        """The launcher that starts the ranks of this machine."""
        return RankLauncher(self._place, self.num_processes, self.num_nodes)

    @property
    def process_group_backend(self) -> str:
        """Name of the backend, as torch knows it."""
        return "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"

    def setup_environment(self) -> None:
        """Select the device of this rank, then join the process group."""
        self._before_joining()
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.join()

    def join(self) -> None:
        """Join the process group, which, unlike Fabric's, is bound to no device.

        If it were bound to a device, torch would split each further group from it by NCCL as soon as the group is
        formed. A large job has thousands of groups.
        """
        for announcer in ("lightning.fabric", "lightning.pytorch"):  # they announce every rank on the terminal
            logging.getLogger(announcer).setLevel(logging.WARNING)
        if self.root_device.type == "cuda":
            connect_when_used()
            if self.num_nodes > 1:
                keep_kernels_here()
        address, port = self._place.main_address, self._place.main_port
        join_group(self.process_group_backend, self.global_rank, self.world_size, address, port, self._joins_within)
        # DeepSpeed and vLLM read these variables, however the ranks were started.
        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(self.global_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
        }

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; on a GPU the device is given, since the process group is bound to none."""
        dist.barrier(device_ids=self._determine_ddp_device_ids())

    @property
    def _place(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None
        return self.cluster_environment


def join_group(backend: str, rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> None:
    """Form the group of all ranks.

    Any program that reaches the store can read and write it. So rank 0 serves the store on one interface only, that of
    `address`. On one machine this is the loopback, on which gloo makes its own connections too.

    Under torchrun the agent serves the store, and this attempt uses keys under a name of its own. The reason is that
    torchrun starts ranks again with the same store, which still has the addresses of ranks that are gone
    (https://github.com/pytorch/pytorch/issues/135712). Its count of restarts cannot be the name, since it may differ
    from agent to agent.

    Args:
        backend: Backend, by torch's name.
        rank: Rank of this process.
        world_size: Number of all ranks.
        address: Address of rank 0's machine.
        port: The store's port.
        timeout: Timeout of the group's collectives, and of joining it.

    Raises:
        UserError: Under torchrun, a rank did not join in time.
    """
    if dist.is_initialized():
        return
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        served = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
        store: Store = PrefixStore(agree_on_name(served, rank, world_size, timeout), served)
    else:
        if address in LOOPBACK and os.path.exists("/sys/class/net/lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        socket = listening(address, port) if rank == 0 else None
        descriptor = None if socket is None else socket.detach()  # the store closes it
        store = TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def agree_on_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a random name that no earlier ranks have used in the store; called by all ranks.

    Rank 0 writes a random name, the call. Every other rank answers with a random name of its own, to each call that it
    finds, since a call may be left from earlier ranks. Rank 0 confirms each answer; a rank whose answer is confirmed
    has found the right call.
    """
    mine, until = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(CALL, mine)
        for other in range(1, world_size):
            while not store.check([f"{mine}/{other}"]):
                _pause(until, other)
            store.set(f"{mine}/{store.get(f'{mine}/{other}').decode()}", "")
        return mine
    called = ""
    while True:
        if store.check([CALL]) and (found := store.get(CALL).decode()) != called:
            called = found
            store.set(f"{called}/{rank}", mine)
        if called and store.check([f"{called}/{mine}"]):
            return called
        _pause(until, 0)


def _pause(until: float, other: int) -> None:
    if time.monotonic() > until:
        raise UserError(
            f"rank {other} did not reach the store of torchrun's agent within `timeout_s`; look at its output, or raise"
            " `strategy.init_args.timeout_s`"
        )
    time.sleep(POLL_S)
