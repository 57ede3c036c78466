"""Hardware by its numbers: makers' rates, the share of them that is reached, and fixed costs of a step."""

from __future__ import annotations

import os
import statistics
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from rlflow.errors import UserError, did_you_mean, one_line


@dataclass(frozen=True)
class Hardware:
    """Nodes of GPUs. SI units: FLOP/s, bytes, bytes/s, seconds. Bandwidths are of one GPU and one direction.

    A YAML file of one's own gives these arguments, or those in which a machine differs from a preset:

        like: h100
        memory: 96.0e+9
        gpus_per_node: 4
        sharing: {2: 1.1, 4: 2.3}

    Args:
        peak_flops: bf16 without sparsity.
        memory: Memory of one GPU.
        memory_bandwidth: Memory bandwidth of one GPU.
        node_bandwidth: Bandwidth between GPUs of a node.
        network_bandwidth: Bandwidth between nodes.
        gpus_per_node: GPUs of a node.
        max_num_seqs: Responses that vLLM generates at the same time, where the engine's `max_num_seqs` is not set.
        storage_bandwidth: Storage bandwidth of a node, from and to the storage of models and checkpoints.
        node_latency: Latency of a collective's hop in a node.
        network_latency: Latency of a collective's hop between nodes.
        message_seconds: Seconds of each message of an all-to-all.
        train_efficiency: Share of the peak that training reaches.
        forward_efficiency: Share of the peak that scoring and reading prompts reach.
        memory_efficiency: Share of the memory bandwidth that decoding reaches.
        link_efficiency: Share of the bandwidths between GPUs that is reached.
        decode_overhead: Overhead of one decoding step, in addition to reading weights and cache.
        row_seconds: Work on the CPU for a row in a node without a role, such as a verifier.
        hub_bandwidth: Bandwidth of a controller through which rows go, packing and unpacking included.
        control_seconds: Work of a metadata controller for a row and value.
        micro_batch_seconds: Seconds of a forward pass in addition to its FLOP; of a backward pass twice that.
        update_seconds: Seconds of an optimizer step in addition to moving its numbers.
        response_seconds: Seconds of an engine for each response in addition to its tokens: reading the request, writing
            the text.
        sync_seconds: Seconds of a weight sync in addition to its bytes.
        exchange_row_seconds: Seconds of a rank for each row and column of a value that it packs and unpacks.
        step_seconds: Seconds of a step in addition to all of these: loading, counting, metrics.
        sharing: Factor by which computing takes longer when so many GPUs of a node compute, where processes share what
            they compute on; between the given numbers in proportion.
    """

    peak_flops: float
    memory: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    node_latency: float = 5e-6
    network_latency: float = 10e-6
    message_seconds: float = 1e-6
    train_efficiency: float = 0.4
    forward_efficiency: float = 0.5
    memory_efficiency: float = 0.7
    link_efficiency: float = 0.8
    decode_overhead: float = 2e-3
    row_seconds: float = 1e-4
    hub_bandwidth: float = 0.3e9
    control_seconds: float = 5e-6
    micro_batch_seconds: float = 0.0
    update_seconds: float = 0.0
    response_seconds: float = 0.0
    sync_seconds: float = 0.0
    exchange_row_seconds: float = 0.0
    step_seconds: float = 0.0
    storage_bandwidth: float = 4e9
    max_num_seqs: int = 1024
    sharing: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sharing = {f"sharing[{ranks}]": factor for ranks, factor in self.sharing.items()}
        for name, value in {**vars(self), **sharing}.items():
            if name.endswith("_efficiency") and not 0 < value <= 1:
                raise UserError(f"`{name}` of the hardware is {value!r}; it is a share, so give at most 1")
            may_be_zero = name.endswith(("_seconds", "_overhead", "_latency"))
            if name != "sharing" and (value < 0 or (value == 0 and not may_be_zero)):
                raise UserError(f"`{name}` of the hardware is {value!r}; give a number above 0")

    def computing_on(self, ranks: int) -> Hardware:
        """The same hardware with each GPU as slow as it is when `ranks` ranks compute, `gpus_per_node` on each node."""
        known = {1: 1.0, **self.sharing}
        slower = float(np.interp(min(ranks, self.gpus_per_node), sorted(known), [known[of] for of in sorted(known)]))
        rates = {name: getattr(self, name) / slower for name in ("peak_flops", "memory_bandwidth")}
        return replace(self, sharing={}, **rates, **{name: getattr(self, name) * slower for name in COMPUTED})


# Seconds of work that a rank does itself, so that processes which share a machine slow each other down.
COMPUTED = (
    "decode_overhead",
    "row_seconds",
    "micro_batch_seconds",
    "update_seconds",
    "response_seconds",
    "sync_seconds",
    "exchange_row_seconds",
    "step_seconds",
)


LAPS = 5  # of each rate that is measured on this machine, after one that is not counted

# NVIDIA's data sheets of the SXM modules, and of the DGX systems for the network: one adapter for each GPU, 400 Gb/s
# (H100, H200) or 200 Gb/s (A100). NVLink's figure is both directions; a half is one. `max_num_seqs` is vLLM's default.
PRESETS = {
    "a100": Hardware(312e12, 80e9, 2.039e12, 300e9, 25e9, max_num_seqs=256),
    "h100": Hardware(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Hardware(989e12, 141e9, 4.8e12, 450e9, 50e9),
}


def read_hardware(name: str) -> Hardware:
    """The hardware of a preset, or of a YAML file.

    Args:
        name: One of `PRESETS`, or a file of `Hardware`'s arguments; `like: h100` takes the rest from a preset.

    Raises:
        UserError: There is no such preset or file, or it says something else.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_file():
        raise UserError(
            f"`--hardware` is {name!r}, neither a preset nor an existing YAML file; give {', '.join(PRESETS)} or a YAML"
            f" file.{did_you_mean(name, PRESETS)}"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Hardware)
    try:
        given = dict(yaml.safe_load(Path(name).read_text()))
        preset = vars(PRESETS[given.pop("like")]) if "like" in given else {}
        arguments = parser.parse_object(preset | given)
    except (yaml.YAMLError, ArgumentError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"`--hardware` is {name!r}, which holds no hardware: {one_line(error)}") from error
    return Hardware(**arguments)


def this_machine(devices: int, on_gpu: bool) -> tuple[str, Hardware]:
    """Name and hardware of this machine: the preset of its GPU, or rates of its CPU without any fixed costs.

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
    return statistics.median(timeit.repeat(way, repeat=1 + LAPS, number=1)[1:])
