"""From YAML files and the command line to objects, by the signatures of their constructors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from docstring_parser import parse
from jsonargparse import Namespace

from rlflow.callbacks.callback import Callback
from rlflow.commands.parser import OneLineParser, keys_of
from rlflow.config.arguments import Argument, Group, arguments_of
from rlflow.config.building import built, made
from rlflow.config.checking import mistakes_of, unreal_numbers
from rlflow.config.errors import ConfigError, WrittenKeys
from rlflow.config.layers import CONFIG, Layer, layers
from rlflow.config.merging import merged
from rlflow.dag.node import NodeConfig
from rlflow.data.prompts import PromptData
from rlflow.loggers.lightning import LoggerLike
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule
from rlflow.rollout.assignment import Share
from rlflow.rollout.engine import RolloutEngine
from rlflow.settings import Placed
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.trainer import Trainer

if TYPE_CHECKING:  # the simulator is imported where it is asked for
    from rlflow.simulate.foretold import Foretold

MODELS, NODES = "models", "nodes"
# Of Trainer, sections of their own in a config.
TOP_LEVEL = {"strategy", "rollout", "engines", "placement", "logger", "callbacks", "seed"}


@dataclass(frozen=True)
class Configured:
    """The objects of a config, and the config itself with all defaults; nothing is loaded."""

    module: RLModule
    data: PromptData
    trainer: Trainer
    config: Mapping[str, Any]
    keys: WrittenKeys
    options: Namespace
    foretold: Foretold | None = None

    def fit(self) -> None:
        """Train, with a prediction before and its error after if asked; a `UserError` names keys of the config."""
        with self.keys.in_errors(self.config):
            before = None if self.foretold is None else self.foretold.before()
            self.trainer.fit(self.module, self.data)
            if self.foretold is not None and before is not None:
                self.foretold.after(before)

    def validate(self) -> None:
        """Measure the model as it is; a `UserError` names keys of the config."""
        with self.keys.in_errors(self.config):
            self.trainer.validate(self.module, self.data)


def config_parser(command: str, description: str) -> OneLineParser:
    """The parser of a command that takes a config."""
    parser = OneLineParser(prog=f"rlflow {command}", description=description, allow_abbrev=False)
    parser.add_argument(
        f"--{CONFIG}", action="config", help="a YAML file; a later one wins, dotted options win over all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    parser.add_argument("--module", type=RLModule, required=True, help="the algorithm")
    parser.add_argument(f"--{MODELS}", type=dict[str, ModelHandle], default={}, help="by role, beside the algorithm's")
    nodes = dict[str, NodeConfig | str | None]
    parser.add_argument(
        f"--{NODES}", type=nodes, default={}, help="added or replaced, by the path of a function; or null"
    )
    _add_arguments(parser, PromptData, "data", ())
    _add_arguments(parser, Trainer, "trainer", TOP_LEVEL)
    parser.add_argument("--strategy", type=TrainingStrategy | None, default=None, help="how training is spread")
    parser.add_argument("--rollout", type=RolloutEngine | None, default=None, help="the engine that generates")
    parser.add_argument(
        "--engines", type=dict[str, Share | RolloutEngine], default={}, help="by policy, where it is not `rollout`"
    )
    parser.add_argument("--placement", type=dict[str, Placed] | None, default=None, help="by role: its ranks")
    parser.add_argument("--logger", type=list[LoggerLike], default=[], help="beside the run's own files")
    parser.add_argument("--callbacks", type=list[Callback], default=[], help="called at steps, nodes and validations")
    return parser


def _add_arguments(parser: OneLineParser, cls: type, section: str, skip: Collection[str]) -> None:
    """Add a constructor's arguments; jsonargparse would import what its module imports for type checkers alone."""
    described = {
        each.arg_name: each.description for base in cls.__mro__[::-1] for each in parse(base.__doc__ or "").params
    }
    group = parser.add_argument_group(f"`{section}`: {cls.__name__}")
    for name, each in arguments_of(cls).items():
        if name not in skip:
            given: dict[str, Any] = {"required": True} if each.required else {"default": each.default}
            group.add_argument(f"--{section}.{name}", type=each.hint, help=described.get(name), **given)


def configured(
    parser: OneLineParser, arguments: Sequence[str], alone: Mapping[str, Any] = MappingProxyType({})
) -> Configured:
    """The objects of a command line.

    Args:
        parser: Of `config_parser`, with the command's own options.
        arguments: Configs and options.
        alone: The command's own options that may stand without a value, and the value that this means.

    Raises:
        UserError: Something is wrong with them.
    """
    with chdir("."):  # back at the end, wherever a module of the user's went when it was imported
        return _configured(parser, arguments, alone)


def _configured(parser: OneLineParser, arguments: Sequence[str], alone: Mapping[str, Any]) -> Configured:
    asked = [argument for argument in arguments if _asks(argument)]
    if asked and not all(_prints_config(argument) for argument in asked):
        parser.parse_args(list(arguments))  # prints help and ends
    given = layers([argument for argument in arguments if argument not in asked], alone)
    _replace_nodes(given)
    shape = _shape(parser)
    tree = merged(given, shape)
    keys = WrittenKeys(given, tree)
    parsed = _parsed(parser, tree, shape, keys)
    if asked:
        parser.parse_args([f"--{CONFIG}", yaml.safe_dump(tree, sort_keys=False), *asked])  # prints it and ends
    resolved = parser.dump(parsed, skip_unset=False)
    config = yaml.safe_load(resolved)
    with keys.in_errors(config):
        parts = {
            name: built(parsed[name], shape.arguments[name].hint, (name,), keys.key)
            for name in ("module", MODELS, NODES, "trainer", *TOP_LEVEL)
        }
        data = made(PromptData, parsed.data, ("data",), ("data",), keys.key)
        trainer = Trainer(**parts["trainer"], **{name: parts[name] for name in TOP_LEVEL})
    for mistake in unreal_numbers(config):
        raise ConfigError(replace(mistake, keys=keys.of(mistake.keys)))
    trainer.resolved_config = resolved
    module = parts["module"]
    if parts[MODELS]:
        module.config_models = parts[MODELS]
    if parts[NODES]:
        module.config_nodes = parts[NODES]
    return Configured(module, data, trainer, config, keys, parsed)


def _replace_nodes(given: Sequence[Layer]) -> None:
    """Of a node that a later config writes with another `call` leave nothing but its place."""
    earlier: dict[str, list[dict[str, Any]]] = {}
    for layer in given:
        nodes = layer.tree.get(NODES)
        if not isinstance(nodes, dict):
            continue
        for name, node in nodes.items():
            before = earlier.setdefault(name, [])
            if isinstance(node, dict) and "call" in node:
                for each in before:
                    each[name] = {}
            before.append(nodes)


def _parsed(parser: OneLineParser, tree: Mapping[str, Any], shape: Group, keys: WrittenKeys) -> Namespace:
    """The config with all defaults, checked; of what is wrong the first is reported."""
    found = list(mistakes_of(tree, shape))
    for mistake in found:  # before jsonargparse, which takes a text for YAML or for a file
        if mistake.of_type:
            raise ConfigError(replace(mistake, keys=keys.of(mistake.keys)))
    try:
        parsed: Namespace = parser.parse_object(copy.deepcopy(dict(tree)))
    except Exception as error:  # jsonargparse lets some errors of its own through
        for mistake in found:
            raise ConfigError(replace(mistake, keys=keys.of(mistake.keys))) from error
        raise
    return parsed


def _shape(parser: OneLineParser) -> Group:
    """The keys that a command's configs and options may have, by section."""
    trainer = {name: each for name, each in arguments_of(Trainer).items() if name not in TOP_LEVEL}
    groups = {"data": Group(arguments_of(PromptData)), "trainer": Group(trainer)}
    return Group(keys_of(parser) | {name: Argument(group) for name, group in groups.items()})


def _asks(argument: str) -> bool:
    """Whether an argument asks for help or for the config, and is not of the config."""
    option = argument.partition("=")[0]
    return option in ("-h", "--help", "--print_config") or (option.startswith("--") and option.endswith(".help"))


def _prints_config(argument: str) -> bool:
    return argument.startswith("--print_config")
