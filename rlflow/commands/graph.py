"""`rlflow graph`: an algorithm's graph and a rank's plan, or what differs between two algorithms."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.commands.configuration import Configured, config_parser, configured
from rlflow.commands.fit import read_fit
from rlflow.commands.graph_difference import Algorithm, difference
from rlflow.commands.graph_drawing import mermaid, svg, text
from rlflow.dotted_path import object_at
from rlflow.errors import UserError
from rlflow.loggers.secrets import without_secrets
from rlflow.models.arguments import model_parameters
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule
from rlflow.rewards import ExactMatch
from rlflow.run.prepare import plan_run
from rlflow.run.prepare import read_graph as read_module_graph


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


def read_graph(arguments: Sequence[str]) -> ConfiguredGraph | ConfiguredDifference:
    """The graph that `rlflow graph` shows, or the two that it compares."""
    parser = config_parser(
        "graph", "Print an algorithm's graph and a rank's plan, or what differs between two algorithms."
    )
    parser.add_argument("--rank", type=int, default=0, help="whose plan is printed")
    parser.add_argument("--draw", type=str | None, default=None, help="write PATH.mmd and PATH.svg")
    parser.add_argument(
        "--diff", type=str, nargs=2, metavar=("A", "B"), help="compare two configs or classes; takes nothing beside it"
    )
    if "--diff" in arguments:
        return _read_difference(arguments)
    found = configured(parser, arguments)
    rank, draw = found.options.rank, found.options.draw
    return ConfiguredGraph(found, rank, None if draw is None else Path(draw))


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
    models = model_parameters(cls)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "reward":
            stand_ins[name] = ExactMatch()
        elif parameter.default is parameter.empty and parameter.annotation in (str, "str"):
            stand_ins[name] = "tiny"
        elif parameter.default is parameter.empty and name in models:
            stand_ins[name] = models[name]("tiny")
        elif parameter.default is parameter.empty:
            raise UserError(
                f"`--diff {given}`: {cls.__name__} needs `{name}`, which a class does not say; name a config"
            )
    return cls(**stand_ins), set(stand_ins)


def _algorithm_class(path: str) -> type[RLModule]:
    found = object_at(path, f"`--diff {path}` names no YAML file")
    if not (isinstance(found, type) and issubclass(found, RLModule)):
        raise UserError(f"`--diff {path}`: it is no RLModule; name a config, or a class such as rlflow.algorithms.GRPO")
    return found


def _algorithm(module: RLModule, without: set[str]) -> Algorithm:
    """With the settings that somebody said, or that have a default."""
    names = [name for name in inspect.signature(type(module)).parameters if name not in without]
    settings: dict[str, Any] = {}
    for name in names:
        value = getattr(module, name)
        if isinstance(value, ModelHandle):
            parameters = inspect.signature(type(value)).parameters
            settings |= {f"{name}.{parameter}": getattr(value, parameter) for parameter in parameters}
        else:
            settings[name] = value
    return Algorithm(module, read_module_graph(module), without_secrets(settings))
