"""`rlflow simulate`, and the prediction that `rlflow fit --predict` makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlflow.commands.configuration import NODES, Configured, call_configured
from rlflow.data.mixture import settings_of
from rlflow.run.prepare import read_graph
from rlflow.simulate.display import show
from rlflow.simulate.hardware import read_hardware, this_machine
from rlflow.simulate.simulation import Scaling, Simulation


def simulate(
    configured: Configured,
    /,
    machines: int = 1,
    hardware: str = "h100",
    scaling: Scaling = "weak",
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
    draw: Path | None = None,
    suggest: bool = False,
) -> Simulation:
    """Predict a config's time, bytes and memory on machines other than this one.

    Args:
        configured: The run.
        machines: Machines to simulate; for this command `--nodes N` is the same.
        hardware: Hardware of the machines: h100, h200, a100, or a YAML file.
        scaling: Whether the step's prompts grow with the ranks (weak) or not (strong).
        prompt_tokens: Tokens of a prompt on average; else half of the longest.
        response_tokens: Tokens of a response on average; else half of the longest.
        draw: Write a picture to PATH.png, .svg or .pdf.
        suggest: Also list the divisions of the trained model that are predicted fastest and fit; with `strategy: fsdp`.
    """
    return Simulation(
        configured.module,
        read_graph(configured.module, settings_of(configured.data.train)),
        configured.data,
        configured.trainer,
        machines,
        hardware,
        read_hardware(hardware),
        scaling,
        prompt_tokens,
        response_tokens,
        picture=draw,
        suggests=suggest,
    )


def read_simulate(arguments: Sequence[str]) -> Simulation:
    """The simulation that `rlflow simulate` shows of a config."""
    # in a config, `nodes` are the graph's
    arguments = [re.sub(rf"^--{NODES}(?==|$)", "--machines", argument) for argument in arguments]
    return call_configured(simulate, arguments)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow simulate`."""
    show(read_simulate(arguments))


def simulation_of_run(found: Configured, hardware: str | None) -> Simulation:
    """The simulation of a run on its own ranks, on this machine (None) or on machines of a kind."""
    trainer, settings = found.trainer, found.trainer.settings
    on_gpu = settings.accelerator != "cpu" and torch.cuda.is_available()
    if hardware is None:
        name, machine = this_machine(settings.ranks_here, on_gpu)
    else:
        name, machine = hardware, replace(read_hardware(hardware), gpus_per_node=settings.ranks_here)
    return Simulation(
        found.module,
        read_graph(found.module, settings_of(found.data.train)),
        found.data,
        trainer,
        settings.num_nodes,
        name,
        machine,
        "strong",
        prompt_tokens=None,
        response_tokens=None,
        on_cpu=not on_gpu,
    )
