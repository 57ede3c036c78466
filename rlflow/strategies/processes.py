"""How the processes of a run are started and meet. Fabric's strategies do it; no more of these is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from rlflow.databuffer.transport import connect_when_used
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
        timeout: Of its collectives.
        before_joining: Called in each rank before it joins, when its device is known.
    """

    def __init__(self, timeout: timedelta, before_joining: Callable[[], None]) -> None:
        super().__init__(timeout=timeout)
        self._before_joining = before_joining

    def setup_environment(self) -> None:
        """Join the process group."""
        self._before_joining()
        super().setup_environment()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; on a GPU it is named, for the process group is bound to none."""
        torch.distributed.barrier(device_ids=self._determine_ddp_device_ids())

    def _setup_distributed(self) -> None:
        for announcer in ("lightning.fabric", "lightning.pytorch"):  # of every rank, on the terminal
            logging.getLogger(announcer).setLevel(logging.WARNING)
        # Without a `device_id`, unlike Fabric: bound to a device, torch would split each further group from that of all
        # ranks while it is formed, at once and by NCCL, thousands of them in a large job.
        self._set_world_ranks()
        assert self.cluster_environment is not None
        backend = "gloo"
        if self.root_device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            connect_when_used()
        place = self.cluster_environment
        assert self._timeout is not None
        join_group(backend, place.global_rank(), place.world_size(), place.main_address, place.main_port, self._timeout)
        self._process_group_backend = backend
        # DeepSpeed and vLLM read them, however the ranks were started.
        os.environ |= {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            "RANK": str(self.global_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
        }

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
