"""How the processes of a run are started and meet. Fabric's strategies do it; no more of these is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from rlflow.databuffer.process_groups import connect_when_used
from rlflow.errors import UserError
from rlflow.strategies.launcher import RankLauncher
from rlflow.strategies.store import join_group


class OneProcess(SingleDeviceStrategy):
    """This process alone."""

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """None before Fabric has chosen: it sets the devices of strategies that have this property."""
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
        timeout: Timeout of its collectives.
        before_joining: Called in each rank before it joins, when its device is known.
    """

    def __init__(self, timeout: timedelta, before_joining: Callable[[], None]) -> None:
        super().__init__()
        self._joins_within = timeout
        self._before_joining = before_joining

    @property
    def launcher(self) -> RankLauncher:
        """Starts the ranks of this machine."""
        return RankLauncher(self._place, self.num_processes, self.num_nodes)

    @property
    def process_group_backend(self) -> str:
        """Name of the backend, as torch knows it."""
        return "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"

    def setup_environment(self) -> None:
        """Join the process group, which, unlike Fabric's, is bound to no device.

        Bound to one, torch would split each further group from that of all ranks while it is formed, at once and by
        NCCL, thousands of them in a large job.
        """
        self._before_joining()
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        for announcer in ("lightning.fabric", "lightning.pytorch"):  # of every rank, on the terminal
            logging.getLogger(announcer).setLevel(logging.WARNING)
        if self.root_device.type == "cuda":
            connect_when_used()
        address, port = self._place.main_address, self._place.main_port
        join_group(self.process_group_backend, self.global_rank, self.world_size, address, port, self._joins_within)
        # DeepSpeed and vLLM read them, however the ranks were started.
        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(self.global_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
        }

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; on a GPU it is named, for the process group is bound to none."""
        device = self.root_device
        torch.distributed.barrier(device_ids=None if device.type == "cpu" else [device.index])

    @property
    def _place(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None
        return self.cluster_environment
