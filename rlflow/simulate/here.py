"""The machine at hand, as far as a moment's look shows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from rlflow.errors import UserError
from rlflow.simulate.hardware import PRESETS, Hardware

LAPS = 5


def this_machine(devices: int, on_gpu: bool) -> tuple[str, Hardware]:
    """Its name, and what it is: the preset of its GPU, or rates of its CPU without any fixed costs.

    Args:
        devices: Ranks that share it.
        on_gpu: Whether they run on GPUs.

    Raises:
        UserError: It has a GPU for which there is no preset.
    """
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        known = next((name for name in PRESETS if name in properties.name.lower()), None)
        if known is None:
            raise UserError(
                f"`--predict`: this machine's GPU is {properties.name!r}, for which there is no preset; give"
                f" `--predict` one of {', '.join(PRESETS)}, or a YAML file of your own"
            )
        return known, replace(PRESETS[known], memory=float(properties.total_memory), gpus_per_node=devices)
    side, whole = torch.randn(512, 512), torch.empty(2**22)  # 16 MB
    copied = 2 * whole.nbytes / _seconds(whole.clone)
    cores = len(os.sched_getaffinity(0))
    machine = Hardware(
        peak_flops=2 * 512**3 / _seconds(lambda: side @ side),
        memory=psutil.virtual_memory().total / devices,
        memory_bandwidth=copied,
        node_bandwidth=copied / 4,
        network_bandwidth=copied / 4,
        gpus_per_node=devices,
        sharing={devices: devices / cores} if devices > cores else {},
    )
    return "this CPU", machine


def _seconds(way: Callable[[], object]) -> float:
    way()
    laps = []
    for _ in range(LAPS):
        began = time.perf_counter()
        way()
        laps.append(time.perf_counter() - began)
    return statistics.median(laps)
