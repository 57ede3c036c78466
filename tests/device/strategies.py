"""Training on the simulated device. Importing this changes torch, see `tests.device.simulated_device`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed.accelerator as accelerator
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import nn

from rlflow.strategies import DeepSpeedStrategy, SingleProcess
from rlflow.strategies.processes import ManyProcesses, OneProcess
from rlflow.strategies.role import Role
from tests.device.simulated_device import DEVICE, NAME


class OneElsewhere(OneProcess):
    """Fabric's accelerator for the CPU refuses other devices, so it is not asked."""

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        assert len(devices) == 1
        self._root_device = DEVICE

    def setup_environment(self) -> None:
        assert self.root_device == DEVICE


class ManyElsewhere(ManyProcesses):
    """Gloo's ranks."""

    @property
    def root_device(self) -> torch.device:
        return DEVICE

    def setup_environment(self) -> None:
        self.join()

    def barrier(self, *args: object, **kwargs: object) -> None:
        torch.distributed.barrier()


class SingleProcessElsewhere(SingleProcess):
    """Strategy that trains in this process.

    Args:
        token_budget: Tokens of a micro-batch.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(token_budget=token_budget)
        self.processes = OneElsewhere()


class DeepSpeedElsewhere(DeepSpeedStrategy):
    """DeepSpeed's stage 0 in float32 among gloo's ranks.

    From stage 1 on, and in bfloat16, DeepSpeed makes weights views of flat buffers by `.data =`, which a wrapper around
    tensors cannot follow.

    Args:
        token_budget: Tokens of a micro-batch.
    """

    def __init__(self, token_budget: int) -> None:
        super().__init__(stage=0, token_budget=token_budget)
        assert self.timeout is not None
        self.processes = ManyElsewhere(self.timeout, self._before_joining)

    def _wrap(self, name: str, role: Role) -> nn.Module:
        model = role.model
        model.to = lambda *_, **__: model  # type: ignore[method-assign]  # it is there, and wrappers would be swapped
        return super()._wrap(name, role)


class _Accelerator(CPU_Accelerator):
    """The device, as DeepSpeed asks for it."""

    def communication_backend_name(self) -> str:
        return "gloo"

    def current_device_name(self) -> str:
        return str(DEVICE)

    def device(self, device_index: int | None = None) -> torch.device:
        return DEVICE

    def device_name(self, device_index: int | None = None) -> str:
        return NAME

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device == DEVICE


@contextmanager
def deepspeed_elsewhere() -> Iterator[None]:
    """A context in which DeepSpeed's device is this one."""
    before = accelerator.get_accelerator()
    accelerator.set_accelerator(_Accelerator())
    try:
        yield
    finally:
        accelerator.set_accelerator(before)
