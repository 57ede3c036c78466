"""Machines on paper: what their makers promise, what share of it is reached, and what else a step costs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from rlflow.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Hardware:
    """Nodes of GPUs. SI units: FLOP/s, bytes, bytes/s, seconds. Bandwidths are of one GPU and one direction.

    Args:
        peak_flops: bf16 without sparsity.
        memory: Of one GPU.
        memory_bandwidth: Of one GPU.
        node_bandwidth: Between GPUs of a node.
        network_bandwidth: Between nodes.
        gpus_per_node: GPUs of a node.
        node_latency: Of a collective's hop in a node.
        network_latency: Of a collective's hop between nodes.
        message_seconds: Of each message of an all-to-all.
        train_efficiency: Share of the peak that training reaches.
        forward_efficiency: Share of the peak that scoring and reading prompts reach.
        memory_efficiency: Share of the memory bandwidth that decoding reaches.
        link_efficiency: Share of the bandwidths between GPUs that is reached.
        decode_overhead: Of one decoding step, beside reading weights and cache.
        row_seconds: Work on the CPU for a row in a node without a role: a verifier, say.
        hub_bandwidth: Of a controller through which rows go, packing and unpacking included.
        control_seconds: Work of a metadata controller for a row and value.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UserError(f"`{field.name}` of the hardware is {value!r}; give a number above 0")
            if field.name.endswith("_efficiency") and value > 1:
                raise UserError(f"`{field.name}` of the hardware is {value!r}; it is a share, so give at most 1")
        if self.gpus_per_node != int(self.gpus_per_node):
            raise UserError(f"`gpus_per_node` of the hardware is {self.gpus_per_node!r}; give a whole number")


# NVIDIA's data sheets of the SXM modules, and of the DGX systems for the network: one adapter for each GPU, 400 Gb/s
# (H100, H200) or 200 Gb/s (A100). NVLink's figure is both directions; a half is one.
PRESETS = {
    "a100": Hardware(312e12, 80e9, 2.039e12, 300e9, 25e9),
    "h100": Hardware(989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Hardware(989e12, 141e9, 4.8e12, 450e9, 50e9),
}


def read_hardware(name: str) -> Hardware:
    """A preset, or what a YAML file says.

    Args:
        name: One of `PRESETS`, or a file of `Hardware`'s arguments; `like: h100` takes the rest from a preset.

    Raises:
        UserError: There is no such preset or file, or it says something else.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = ", ".join(PRESETS)
        raise UserError(
            f"`--hardware` is {name!r}; give {known} or a YAML file of your own.{did_you_mean(name, PRESETS)}"
        )
    if not path.is_file():
        raise UserError(
            f"`--hardware` is {name!r}, and there is no such file; give {', '.join(PRESETS)} or a YAML file"
        )
    try:
        told = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"`--hardware` is {name!r}, which is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(told, dict):
        raise UserError(f"`--hardware` is {name!r}, which holds {told!r}; write `memory: 80.0e+9` and the like")
    return _told(name, told)


def _told(name: str, told: dict[Any, Any]) -> Hardware:
    like = told.pop("like", None)
    if like is not None and like not in PRESETS:
        raise UserError(f"`like` in {name} is {like!r}; give one of {', '.join(PRESETS)}")
    known = [field.name for field in fields(Hardware)]
    for key in told:
        if key not in known:
            near = did_you_mean(str(key), known)
            raise UserError(f"`{key}` in {name} is no known key.{near} Known here: like, {', '.join(known)}")
    missing = [field.name for field in fields(Hardware) if field.default is MISSING and field.name not in told]
    if like is None and missing:
        raise UserError(f"{name} does not say `{missing[0]}`; add it, or `like: h100` for the rest")
    rest = {} if like is None else vars(PRESETS[like])
    return Hardware(**{**rest, **told})
