"""From a YAML file and the command line to objects: jsonargparse parsers made from the constructors' signatures."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader

from rlflow.callbacks.callback import Callback
from rlflow.commands.export import Export, Form
from rlflow.commands.graph_difference import Algorithm, difference
from rlflow.commands.graph_drawing import mermaid, svg, text
from rlflow.commands.report import MergedTrace, Report
from rlflow.config_errors import ConfigError, complaint, naming_keys, written
from rlflow.dag.entry import Entry
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError, did_you_mean
from rlflow.loggers.logger import Logger
from rlflow.loggers.secrets import without_secrets
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule
from rlflow.process.status import Answered
from rlflow.rewards import ExactMatch
from rlflow.rollout.assignment import Share
from rlflow.rollout.engine import RolloutEngine
from rlflow.run.prepare import plan_run
from rlflow.run.prepare import read_graph as read_module_graph
from rlflow.settings import Placed
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.trainer import Trainer
from rlflow.workflow.entries import NODES, as_yaml, read_entries

if TYPE_CHECKING:  # the simulator is imported where it is asked for
    from rlflow.simulate.command import ShownSimulation
    from rlflow.simulate.foretold import Foretold

MODELS = "models"
HERE = "this machine"
TOP_LEVEL = {
    "strategy",
    "rollout",
    "engines",
    "placement",
    "logger",
    "callbacks",
    "seed",
}  # of Trainer, sections of their own in a config
STRATEGIES = {
    "deepspeed": "rlflow.strategies.DeepSpeedStrategy",
    "fsdp": "rlflow.strategies.FSDPStrategy",
    "single": "rlflow.strategies.SingleProcess",
}  # short names
_as_written = get_loader("yaml")


def _load_yaml(text: str) -> Any:
    """What jsonargparse reads: a config's `strategy` by its short name is one by its class."""
    tree = _as_written(text)
    given = tree.get("strategy") if isinstance(tree, dict) else None
    if isinstance(given, str):
        tree["strategy"] = STRATEGIES.get(given, given)
    elif isinstance(given, dict) and given.get("class_path") in STRATEGIES:
        given["class_path"] = STRATEGIES[given["class_path"]]
    return tree


set_loader("yaml", _load_yaml)


@dataclass(frozen=True)
class Configured:
    """The objects of a config, and the config itself with all defaults; nothing is loaded."""

    module: RLModule
    data: PromptData
    trainer: Trainer
    config: Mapping[str, Any]
    foretold: Foretold | None = None

    def fit(self) -> None:
        """Train, with a prediction before and its error after if asked; a `UserError` names keys of the config."""
        with naming_keys(self.config):
            told = None if self.foretold is None else self.foretold.before()
            self.trainer.fit(self.module, self.data)
            if self.foretold is not None and told is not None:
                self.foretold.after(told)

    def validate(self) -> None:
        """Measure the model as it is; a `UserError` names keys of the config."""
        with naming_keys(self.config):
            self.trainer.validate(self.module, self.data)


@dataclass(frozen=True)
class ConfiguredGraph:
    """A graph to be shown: for which rank, and where its drawings go."""

    configured: Configured
    rank: int
    draw: Path | None

    def show(self) -> None:
        """Print the nodes and the rank's plan; write `<draw>.mmd` and `<draw>.svg` if asked."""
        module, trainer = self.configured.module, self.configured.trainer
        world_size = trainer.settings.machines.world_size
        if not 0 <= self.rank < world_size:
            raise UserError(f"`--rank` is {self.rank}, but the config has the ranks 0 to {world_size - 1}; name one")
        run = plan_run(module, trainer.settings, trainer.engine_settings)
        graph, planned = run.graph, run.plan
        print(text(graph, planned, self.rank))
        if self.draw is not None:
            self.draw.parent.mkdir(parents=True, exist_ok=True)
            for suffix, drawing in {".mmd": mermaid(graph, planned), ".svg": svg(graph, planned)}.items():
                path = self.draw.with_suffix(suffix)
                path.write_text(drawing)
                print(f"drew {path}")


@dataclass(frozen=True)
class ConfiguredDifference:
    """Two algorithms to be compared."""

    left: Algorithm
    right: Algorithm

    def show(self) -> None:
        """Print what differs between their graphs, their other methods, and their settings."""
        print(difference(self.left, self.right))


class OneLineParser(ArgumentParser):
    """Says of a wrong config one line, and does not print its usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong."""
        raise complaint(message if ex is None else ex, self) from ex

    def exit(self, code: int = 0, message: str | None = None) -> NoReturn:
        """End the command: help was printed."""
        raise Answered(code)


def read_fit(arguments: Sequence[str]) -> Configured:
    """The objects that `rlflow fit` runs."""
    parser = _parser("fit", "Train a model as a config says.")
    parser.add_argument(
        "--predict",
        type=str,
        nargs="?",
        const=HERE,
        default=None,
        metavar="HARDWARE",
        help="print what a step will take, and at the end how far that was off; on this machine, or as in `simulate`",
    )
    parsed = _parsed(parser, arguments)
    hardware = parsed.pop("predict")
    configured = _build(parser, parsed, read_entries(arguments))
    if hardware is None or not _speaks():
        return configured
    return replace(configured, foretold=_foretold(configured, hardware))


def read_validate(arguments: Sequence[str]) -> Configured:
    """The objects that `rlflow validate` runs."""
    parser = _parser("validate", "Measure a config's model on its held-out prompts.")
    return _build(parser, _parsed(parser, arguments), read_entries(arguments))


def read_graph(arguments: Sequence[str]) -> ConfiguredGraph | ConfiguredDifference:
    """The graph that `rlflow graph` shows, or the two that it compares."""
    parser = _parser("graph", "Print an algorithm's graph and a rank's plan, or what differs between two algorithms.")
    parser.add_argument("--rank", type=int, default=0, help="whose plan is printed")
    parser.add_argument("--draw", type=str | None, default=None, help="write PATH.mmd and PATH.svg")
    parser.add_argument(
        "--diff", type=str, nargs=2, metavar=("A", "B"), help="compare two configs or classes; takes nothing beside it"
    )
    if "--diff" in arguments:
        return _read_difference(arguments)
    parsed = _parsed(parser, arguments)
    configured = _build(parser, parsed, read_entries(arguments))
    return ConfiguredGraph(configured, parsed.rank, None if parsed.draw is None else Path(parsed.draw))


def read_simulate(arguments: Sequence[str]) -> ShownSimulation:
    """What `rlflow simulate` predicts of a config."""
    from rlflow.simulate.command import ShownSimulation
    from rlflow.simulate.hardware import read_hardware
    from rlflow.simulate.simulation import Scaling, Simulation

    parser = _parser("simulate", "Predict a config's time, bytes and memory on machines that are not here.")
    parser.add_argument("--machines", type=int, default=1, help="to be simulated; here, `--nodes N` is the same")
    parser.add_argument("--hardware", type=str, default="h100", help="h100, h200, a100, or a YAML file")
    parser.add_argument(
        "--scaling", type=Scaling, default="weak", help="whether the step's prompts grow with the ranks"
    )
    parser.add_argument("--prompt_tokens", type=float | None, default=None, help="on average; half of the longest")
    parser.add_argument("--response_tokens", type=float | None, default=None, help="on average; half of the longest")
    parser.add_argument("--draw", type=str | None, default=None, help="write a picture to PATH.png, .svg or .pdf")
    parser.add_argument("--paper", action="store_true", help="continue the DistFlow paper's curves instead; no config")
    arguments = _counting_machines(arguments)
    parsed = _parsed(parser, arguments)
    configured = _build(parser, parsed, read_entries(arguments))
    simulation = Simulation(
        configured.module,
        read_module_graph(configured.module),
        configured.data,
        configured.trainer,
        parsed.machines,
        parsed.hardware,
        read_hardware(parsed.hardware),
        parsed.scaling,
        parsed.prompt_tokens,
        parsed.response_tokens,
    )
    return ShownSimulation(simulation, None if parsed.draw is None else Path(parsed.draw))


def _foretold(configured: Configured, hardware: str) -> Foretold:
    from rlflow.simulate.foretold import Foretold
    from rlflow.simulate.hardware import read_hardware
    from rlflow.simulate.here import this_machine
    from rlflow.simulate.simulation import Simulation

    trainer, settings = configured.trainer, configured.trainer.settings
    on_gpu = settings.accelerator != "cpu" and torch.cuda.is_available()
    if hardware == HERE:
        name, machine = this_machine(settings.devices, on_gpu)
    else:
        name, machine = hardware, replace(read_hardware(hardware), gpus_per_node=settings.devices)
    simulation = Simulation(
        configured.module,
        read_module_graph(configured.module),
        configured.data,
        trainer,
        settings.num_nodes,
        name,
        machine,
        "strong",
        None,
        None,
        not on_gpu,
    )
    return Foretold(simulation)


def _speaks() -> bool:
    """Whether this process is the job's first, however it was started."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


def _counting_machines(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--machines` for `--nodes`, which in a config are the graph's."""
    return [re.sub(rf"^--{NODES}(?==|$)", "--machines", argument) for argument in arguments]


def read_export(arguments: Sequence[str]) -> Export:
    """What `rlflow export` writes."""
    parser = OneLineParser(
        prog="rlflow export", description="Write a run's adapter, or the model with it.", allow_abbrev=False
    )
    parser.add_argument("--model", type=str, required=True, help="an adapter's folder: `model` of a run with `lora`")
    parser.add_argument("--to", type=str, required=True, help="a new folder")
    parser.add_argument("--form", type=Form, default="merged", help="a whole model, or the adapter in peft's form")
    parsed = parser.parse_args(list(arguments))
    return Export(Path(parsed.model), Path(parsed.to), parsed.form)


def read_report(arguments: Sequence[str]) -> Report:
    """What `rlflow report` shows."""
    parser = OneLineParser(
        prog="rlflow report", description="Show where the time of a run's steps went, rank by rank.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run, whether it ended or not")
    parser.add_argument("--step", type=int | None, default=None, help="the last step shown; else the run's last")
    parser.add_argument("--steps", type=int, default=3, help="how many, up to that one")
    parser.add_argument(
        "--draw", type=str | None, default=None, help="PATH.png, .svg or .pdf; else RUN_DIR/timeline.png"
    )
    parsed = parser.parse_args(list(arguments))
    return Report(Path(parsed.run_dir), parsed.step, parsed.steps, None if parsed.draw is None else Path(parsed.draw))


def read_trace(arguments: Sequence[str]) -> MergedTrace:
    """What `rlflow trace` joins."""
    parser = OneLineParser(
        prog="rlflow trace", description="Join the traces of a run's ranks, for ui.perfetto.dev.", allow_abbrev=False
    )
    parser.add_argument("run_dir", type=str, help="the folder of a run, whether it ended or not")
    parser.add_argument("--to", type=str | None, default=None, help="the file; else RUN_DIR/traces/trace.json")
    parser.add_argument("--ranks", type=list[int] | None, default=None, help="such as [0,8]; else all")
    parser.add_argument("--step", type=int | None, default=None, help="the last step in it; else the run's last")
    parser.add_argument("--steps", type=int | None, default=None, help="how many, up to that one; else all")
    parsed = parser.parse_args(list(arguments))
    to = None if parsed.to is None else Path(parsed.to)
    return MergedTrace(Path(parsed.run_dir), to, parsed.ranks, parsed.step, parsed.steps)


def _read_difference(arguments: Sequence[str]) -> ConfiguredDifference:
    given = [argument for argument in arguments if argument != "--diff"]
    if arguments[0] != "--diff" or len(given) != 2 or len(arguments) != 3:
        raise UserError(
            f"`rlflow graph {' '.join(arguments)}`: `--diff` compares two algorithms and takes nothing beside them;"
            " write `rlflow graph --diff A B`, each a config or a class such as rlflow.algorithms.GRPO"
        )
    (left, filled_left), (right, filled_right) = map(_module, given)
    filled = filled_left | filled_right
    return ConfiguredDifference(_algorithm(left, filled), _algorithm(right, filled))


def _module(given: str) -> tuple[RLModule, set[str]]:
    """The module of a config or of a class, and which of its settings nobody said."""
    if given.endswith((".yaml", ".yml")) or Path(given).is_file():
        return read_fit(["--config", given]).module, set()
    cls = _algorithm_class(given)
    stand_ins: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "reward":
            stand_ins[name] = ExactMatch()
        elif parameter.default is parameter.empty and parameter.annotation in (str, "str"):
            stand_ins[name] = "tiny"
        elif parameter.default is parameter.empty:
            raise UserError(
                f"`--diff {given}`: {cls.__name__} needs `{name}`, which a class does not say; name a config"
            )
    return cls(**stand_ins), set(stand_ins)


def _algorithm_class(path: str) -> type[RLModule]:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        near = did_you_mean(
            path, [f"rlflow.algorithms.{known}" for known in import_module("rlflow.algorithms").__all__]
        )
        raise UserError(
            f"`--diff {path}`: neither a config nor a class ({error}); name a YAML file, or a class such as"
            f" rlflow.algorithms.GRPO.{near}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, RLModule)):
        raise UserError(f"`--diff {path}`: it is no RLModule; name a config, or a class such as rlflow.algorithms.GRPO")
    return found


def _algorithm(module: RLModule, without: set[str]) -> Algorithm:
    """With the settings that somebody said, or that have a default."""
    names = [name for name in inspect.signature(type(module)).parameters if name not in without]
    settings = {name: getattr(module, name) for name in names}
    return Algorithm(module, read_module_graph(module), without_secrets(settings))


def _parser(command: str, description: str) -> OneLineParser:
    parser = OneLineParser(prog=f"rlflow {command}", description=description, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a YAML file; a later one wins, dotted options win over all")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--module", type=RLModule, required=True, help="the algorithm")
    parser.add_argument(f"--{MODELS}", type=dict[str, ModelHandle], default={}, help="by role, beside the algorithm's")
    parser.add_argument(f"--{NODES}", type=list[dict[str, Any]], default=[], help="added, replaced or removed")
    parser.add_class_arguments(PromptData, "data")
    parser.add_class_arguments(Trainer, "trainer", skip=TOP_LEVEL, instantiate=False)
    parser.add_argument("--strategy", type=TrainingStrategy | None, default=None, help="how training is spread")
    parser.add_argument("--rollout", type=RolloutEngine | None, default=None, help="the engine that generates")
    parser.add_argument(
        "--engines", type=dict[str, Share | RolloutEngine], default={}, help="by policy, where it is not `rollout`"
    )
    parser.add_argument("--placement", type=dict[str, Placed] | None, default=None, help="by role: its ranks")
    parser.add_argument("--logger", type=list[Logger], default=[], help="beside the run's own files")
    parser.add_argument("--callbacks", type=list[Callback], default=[], help="told of steps, nodes and validations")
    return parser


def _parsed(parser: OneLineParser, arguments: Sequence[str]) -> Namespace:
    given = written(arguments)
    sections = {}  # which jsonargparse would take from the last config alone
    if entries := read_entries(arguments):
        sections[NODES] = as_yaml(entries)
    if given.get(MODELS):
        sections[MODELS] = yaml.safe_dump(given[MODELS], default_flow_style=True, width=2**31).strip()
    try:
        return parser.parse_args(_with_classes(_with_sections(arguments, sections)))
    except ConfigError as error:
        raise error.told_of(given) from error


def _with_classes(arguments: Sequence[str]) -> list[str]:
    """The arguments with the strategy's class for its short name."""
    before = ["", *arguments]
    return [_class_of(option, argument) for option, argument in zip(before, arguments, strict=False)]


def _class_of(option: str, argument: str) -> str:
    of_strategy = ("--strategy", "--strategy.class_path")
    if option in of_strategy:
        return STRATEGIES.get(argument, argument)
    name, equals, value = argument.partition("=")
    return f"{name}={STRATEGIES.get(value, value)}" if equals and name in of_strategy else argument


def _with_sections(arguments: Sequence[str], sections: Mapping[str, str]) -> list[str]:
    """The arguments with whole sections behind the last config, and without the options that these are made of."""
    kept: list[str] = []
    place = 0
    rest = list(arguments)
    while rest:
        option = [rest.pop(0)]
        if option[0].startswith("--") and "=" not in option[0] and rest and not rest[0].startswith("--"):
            option.append(rest.pop(0))
        name = option[0].partition("=")[0]
        if name != f"--{NODES}" and not name.startswith(f"--{NODES}."):
            kept += option
        if name == "--config":
            place = len(kept)
    whole = [argument for name, text in sections.items() for argument in (f"--{name}", text)]
    return [*kept[:place], *whole, *kept[place:]]


def _build(parser: OneLineParser, parsed: Namespace, entries: Sequence[Entry]) -> Configured:
    resolved = parser.dump(parsed, skip_unset=False)
    config = yaml.safe_load(resolved)
    with naming_keys(config):
        try:
            parsed.pop(NODES)  # of `entries`, whose parameters are instantiated with the functions' types
            built: Any = parser.instantiate(parsed)
        except ValueError as error:  # jsonargparse wraps what a constructor raised
            raise complaint(error, parser) from error
        trainer = Trainer(
            **parsed.trainer.as_dict(),
            strategy=built.strategy,
            rollout=built.rollout,
            engines=built.engines,
            placement=built.placement,
            logger=built.logger,
            callbacks=built.callbacks,
            seed=built.seed,
        )
    trainer.resolved_config = resolved
    if built.models:
        built.module.config_models = built.models
    if entries:
        built.module.config_nodes = tuple(entries)
    return Configured(built.module, built.data, trainer, config)
