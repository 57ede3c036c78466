"""`rlflow simulate`, and the prediction that `rlflow fit --predict` makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlflow.commands.configuration import NODES, Configured, config_parser, configured
from rlflow.run.prepare import read_graph
from rlflow.simulate.hardware import read_hardware, this_machine
from rlflow.simulate.simulation import Scaling, Simulation


def read_simulate(arguments: Sequence[str]) -> Simulation:
    """The simulation that `rlflow simulate` shows of a config."""
    parser = config_parser("simulate", "Predict a config's time, bytes and memory on machines that are not here.")
    parser.add_argument("--machines", type=int, default=1, help="to be simulated; here, `--nodes N` is the same")
    parser.add_argument("--hardware", type=str, default="h100", help="h100, h200, a100, or a YAML file")
    parser.add_argument(
        "--scaling", type=Scaling, default="weak", help="whether the step's prompts grow with the ranks"
    )
    parser.add_argument("--prompt_tokens", type=float | None, default=None, help="on average; half of the longest")
    parser.add_argument("--response_tokens", type=float | None, default=None, help="on average; half of the longest")
    parser.add_argument("--draw", type=str | None, default=None, help="write a picture to PATH.png, .svg or .pdf")
    parser.add_argument("--paper", action="store_true", help="continue the DistFlow paper's curves instead; no config")
    found = configured(parser, _counting_machines(arguments))
    parsed = found.options
    return Simulation(
        found.module,
        read_graph(found.module),
        found.data,
        found.trainer,
        parsed.machines,
        parsed.hardware,
        read_hardware(parsed.hardware),
        parsed.scaling,
        parsed.prompt_tokens,
        parsed.response_tokens,
        picture=None if parsed.draw is None else Path(parsed.draw),
    )


def simulation_of_run(found: Configured, hardware: str | None) -> Simulation:
    """A run on its own ranks, on this machine (None) or on machines of a kind."""
    trainer, settings = found.trainer, found.trainer.settings
    on_gpu = settings.accelerator != "cpu" and torch.cuda.is_available()
    if hardware is None:
        name, machine = this_machine(settings.devices, on_gpu)
    else:
        name, machine = hardware, replace(read_hardware(hardware), gpus_per_node=settings.devices)
    return Simulation(
        found.module,
        read_graph(found.module),
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


def _counting_machines(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--machines` for `--nodes`, which in a config are the graph's."""
    return [re.sub(rf"^--{NODES}(?==|$)", "--machines", argument) for argument in arguments]
