"""Builds objects from YAML files and the command line, by the signatures of their constructors."""

from __future__ import annotations

import argparse
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

import yaml
from docstring_parser import parse
from jsonargparse import Namespace

from rlflow.commands.parser import OneLineParser, add_parameters, keys_of
from rlflow.config.arguments import Argument, Group, arguments_of, chosen_classes, entry_hint
from rlflow.config.building import built, instance
from rlflow.config.checking import hidden_secrets, mistakes_of, unreal_numbers
from rlflow.config.command_line import CONFIG, as_yaml, layers, options
from rlflow.config.keys import WrittenKeys
from rlflow.config.merging import merged
from rlflow.dag.node import NodeConfig
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule
from rlflow.process.status import refusing_exits
from rlflow.short_names import class_named, names_of
from rlflow.trainer import Trainer

if TYPE_CHECKING:  # the simulator is imported where it is asked for
    from rlflow.simulate.simulation import Simulation

MODELS, NODES = "models", "nodes"
HELP, HELP_ALL = ".help", "--help-all"
READERS = ("validate", "test", "predict")  # commands that read a model and train none
# Options that `--help` lists, with the command's own; `--help-all` lists all.
OFTEN = (
    "config",
    "print_config",
    "module",
    "data.train",
    "data.validation",
    "data.prompts_per_step",
    "seed",
    "strategy",
    "rollout",
    "logger",
    "trainer.run_dir",
    "trainer.max_steps",
    "trainer.devices",
    "trainer.val_check_interval",
    "trainer.save_every_n_steps",
    "trainer.ckpt_path",
    "trainer.fast_dev_run",
)
OF_FIT = ("trainer.ckpt_path", "trainer.fast_dev_run")  # those of them that only a training run needs
# Arguments of Trainer that are top-level keys in a config.
TOP_LEVEL = ("seed", "strategy", "rollout", "engines", "placement", "logger", "callbacks")


@dataclass(frozen=True)
class Configured:
    """The objects of a config, and the config itself with all defaults; nothing is loaded.

    Attributes:
        module: The algorithm.
        data: Rows to train and validate on.
        trainer: Trainer with all settings of the run.
        config: The config that the run stores in `config.yaml`: all defaults, classes as `class_path` and `init_args`.
        keys: Keys as the user wrote them, for errors.
        simulation: Simulation that predicts the run, if that was asked for.
    """

    module: RLModule
    data: PromptData
    trainer: Trainer
    config: Mapping[str, Any]
    keys: WrittenKeys
    simulation: Simulation | None = None

    def fit(self) -> None:
        """Train, with a prediction before and its error after if asked; a `UserError` names keys of the config."""
        self.require_secrets()
        with self.keys.in_errors(self.config), ExitStack() as stack:
            if self.simulation is not None:
                from rlflow.simulate.display import prediction

                stack.enter_context(prediction(self.simulation))
            self.trainer.fit(self.module, self.data)

    def require_secrets(self, *unused: str) -> None:
        """Refuse secrets that the config of a run hides; those in `unused` sections may be hidden."""
        for mistake in hidden_secrets({key: value for key, value in self.config.items() if key not in unused}):
            raise mistake.error(self.keys.of(mistake.keys))


Result = TypeVar("Result")


def call_configured(command: Callable[Concatenate[Configured, ...], Result], arguments: Sequence[str]) -> Result:
    """Call the function of a command that takes a config with the config and options of a command line.

    Args:
        command: Named as the command; it takes the config first, see `add_parameters` for the others.
        arguments: The command line after the command's name.

    Raises:
        UserError: Something is wrong with them; or the command raised it, and it names keys of the config.
    """
    parser = config_parser(command.__name__, parse(command.__doc__ or "").short_description or "")
    add_parameters(parser, command, skip=1)
    with refusing_exits():
        found, options = configured(parser, arguments)
    if command.__name__ in READERS:
        found.require_secrets("logger")
    given = {name: options[name] for name in [*inspect.signature(command).parameters][1:]}
    with found.keys.in_errors(found.config):
        return command(found, **given)


def config_parser(command: str, description: str) -> OneLineParser:
    """The parser of a command that takes a config."""
    parser = OneLineParser(prog=f"rlflow {command}", description=description, allow_abbrev=False)
    parser.add_argument(
        f"--{CONFIG}", action="config", help="a YAML file; a later one wins, dotted options win over all"
    )
    parser.add_argument("--module", type=RLModule, required=True, help="the algorithm")
    parser.add_argument(f"--{MODELS}", type=dict[str, ModelHandle], default={}, help="by role, with the algorithm's")
    nodes = dict[str, NodeConfig | str | None]
    parser.add_argument(
        f"--{NODES}", type=nodes, default={}, help="added or replaced, by the path of a function; or null"
    )
    _add_arguments(parser, PromptData, "data.", arguments_of(PromptData))
    of_trainer = arguments_of(Trainer)
    _add_arguments(parser, Trainer, "", {name: of_trainer.pop(name) for name in TOP_LEVEL})
    _add_arguments(parser, Trainer, "trainer.", of_trainer)
    return parser


def _add_arguments(parser: OneLineParser, cls: type, start: str, arguments: Mapping[str, Argument]) -> None:
    """Add a constructor's arguments; jsonargparse would import what its module imports for type checkers alone.

    Args:
        parser: Parser of a command.
        cls: Class whose docstrings describe the arguments.
        start: Beginning of each key, such as `trainer.`.
        arguments: Arguments of the constructor, all or some of them, by name.
    """
    described = {
        each.arg_name: each.description for base in cls.__mro__[::-1] for each in parse(base.__doc__ or "").params
    }
    group = parser.add_argument_group(f"`{start.rstrip('.')}`: {cls.__name__}" if start else cls.__name__)
    for name, each in arguments.items():
        given: dict[str, Any] = {"required": True} if each.required else {"default": each.default}
        group.add_argument(f"--{start}{name}", type=each.hint, help=described.get(name), **given)


def configured(parser: OneLineParser, arguments: Sequence[str]) -> tuple[Configured, Namespace]:
    """The objects of a command line, and its options with all defaults.

    Args:
        parser: Parser from `config_parser`, with the command's own options.
        arguments: Configs and options.

    Raises:
        UserError: Something is wrong with them.
    """
    if asked_for := {"-h", "--help", HELP_ALL} & set(arguments):
        print(parser.format_help() if HELP_ALL in asked_for else _short_help(parser))
        parser.exit()
    with chdir("."):  # back at the end, wherever a module of the user's went when it was imported
        asked, shape = [argument for argument in arguments if _asks(argument)], _shape(parser)
        for argument in asked:
            option, name = next(options(arguments[arguments.index(argument) :]))
            key = option.removesuffix(HELP)
            if (of_trainer := key.removeprefix("trainer.")) in TOP_LEVEL:
                key = of_trainer
            if bases := _bases(key, shape):
                print(_class_help(parser.prog, key, name, bases))
                parser.exit()
        if not all(argument.startswith("--print_config") for argument in asked):
            parser.parse_args(list(arguments))  # prints help and ends
        alone = {action.dest: action.const for action in parser._actions if action.nargs in (0, "?")}
        given = layers([argument for argument in arguments if argument not in asked], alone)
        _replace_nodes(given)
        tree = merged(given, shape)
        keys = WrittenKeys(given, tree)
        parsed = _parsed(parser, tree, shape, keys)
        if asked:
            if any("comments" in argument for argument in asked) and find_spec("ruamel") is None:
                raise UserError(
                    "`--print_config=comments` needs ruamel.yaml, which is not installed; `pip install ruamel.yaml`, or"
                    " leave out `comments`"
                )
            parser.parse_args([f"--{CONFIG}", as_yaml(tree), *asked])  # prints it and ends
        resolved = parser.dump(parsed, skip_unset=False)
        config = yaml.safe_load(resolved)
        with keys.in_errors(config):
            parts = {
                name: built(parsed[name], shape.arguments[name].hint, (name,), keys.key)
                for name in ("module", MODELS, NODES, "trainer", *TOP_LEVEL)
            }
            data = instance(PromptData, parsed.data, ("data",), ("data",), keys.key)
            trainer = Trainer(**parts["trainer"], **{name: parts[name] for name in TOP_LEVEL})
        for mistake in unreal_numbers(config):
            raise mistake.error(keys.of(mistake.keys))
        trainer.resolved_config = resolved
        module = parts["module"]
        if parts[MODELS]:
            module.config_models = parts[MODELS]
        if parts[NODES]:
            module.config_nodes = parts[NODES]
        return Configured(module, data, trainer, config, keys), parsed


def _replace_nodes(given: Sequence[dict[str, Any]]) -> None:
    """Clear what earlier configs write of a node that a later one writes with a `call`; the node's place stays."""
    earlier: dict[str, list[dict[str, Any]]] = {}
    for layer in given:
        nodes = layer.get(NODES)
        if not isinstance(nodes, dict):
            continue
        for name, node in nodes.items():
            before = earlier.setdefault(name, [])
            if isinstance(node, dict) and "call" in node:
                for each in before:
                    each[name] = {}
            before.append(nodes)


def _parsed(parser: OneLineParser, tree: Mapping[str, Any], shape: Group, keys: WrittenKeys) -> Namespace:
    """The config with all defaults, checked; of several mistakes the first is reported."""
    found = list(mistakes_of(tree, shape))
    for mistake in found:  # before jsonargparse, which takes a text for YAML or for a file
        if mistake.of_type:
            raise mistake.error(keys.of(mistake.keys))
    try:
        parsed: Namespace = parser.parse_object(copy.deepcopy(dict(tree)))
    except Exception as error:  # jsonargparse lets some errors of its own through
        for mistake in found:
            raise mistake.error(keys.of(mistake.keys)) from error
        raise
    return parsed


def _shape(parser: OneLineParser) -> Group:
    """The keys that a command's configs and options may have, by section."""
    trainer = {name: each for name, each in arguments_of(Trainer).items() if name not in TOP_LEVEL}
    groups = {"data": Group(arguments_of(PromptData)), "trainer": Group(trainer)}
    return Group(keys_of(parser) | {name: Argument(group) for name, group in groups.items()})


def _asks(argument: str) -> bool:
    """Whether an argument asks for help of a class or for the config, and is not of the config."""
    option = argument.partition("=")[0]
    return option == "--print_config" or (option.startswith("--") and option.endswith(HELP))


def _bases(key: str, shape: Group) -> list[type]:
    """The base classes that a config's key takes: of one object, or of a list or dict of them. Empty for other keys."""
    first, *further = key.split(".")
    found = shape.arguments.get(first)
    while found is not None and further and isinstance(found.hint, Group):
        found = found.hint.arguments.get(further.pop(0))
    if found is None or isinstance(found.hint, Group):
        return []
    hints = (found.hint, entry_hint(found.hint, list), entry_hint(found.hint, dict))
    classes = [cls for hint in hints for cls in chosen_classes(hint)]
    return [object] if classes and further else classes  # below a class, such as `module.reward`, a key takes any


def _class_help(command: str, key: str, name: str | None, bases: Sequence[type]) -> str:
    """The settings of a class by its name, or without a name those of rlflow's classes that the key takes.

    Raises:
        UserError: There is no such class.
    """
    if name is None:
        return f"`{command} --{key}{HELP} NAME` lists the settings of one of: {', '.join(names_of(bases)[::2])}"
    try:
        cls = class_named(name, bases)
    except UserError as error:
        raise UserError(f"`--{key}{HELP}` {error}") from error
    usage = f"{command} --{key} {name} [--{key}.SETTING VALUE ...]"
    description = parse(cls.__doc__ or "").short_description
    parser = OneLineParser(usage=usage, description=description, add_help=False, allow_abbrev=False)
    _add_arguments(parser, cls, f"{key}.", arguments_of(cls))
    return parser.format_help()


def _short_help(parser: OneLineParser) -> str:
    """Help that fits a screen: an example, and the first sentence of the options that most runs need."""
    of_config = {MODELS, NODES, *TOP_LEVEL}
    command = parser.prog.split()[-1]
    often = [key for key in OFTEN if command == "fit" or key not in OF_FIT]
    shown = [
        each
        for each in parser._actions
        if each.dest in often or not ("." in each.dest or each.dest in of_config or each.dest == "help")
    ]
    places = "".join(f" {each.dest.upper()}" for each in shown if not each.option_strings)
    # A run's folder is written by some commands, and is the model that others read.
    option = "--module.actor" if command in READERS else "--trainer.run_dir"
    short = argparse.ArgumentParser(
        prog=parser.prog,
        usage=f"{parser.prog}{places} --config FILE [--KEY VALUE ...]",
        description=parser.description,
        epilog=f"example:\n  {parser.prog}{places} --config my.yaml {option} runs/mine\n\n"
        f"`{parser.prog} {HELP_ALL}` lists every key, `{parser.prog} --module.help GRPO` those of an algorithm.",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34),
        add_help=False,
    )
    for each in shown:
        sentence = re.split(r"[.;:] ", each.help or "")[0].rstrip(".").replace("%", "%%")
        if each.option_strings:
            short.add_argument(each.option_strings[0], metavar="", help=sentence)
        else:
            short.add_argument(each.dest, help=sentence)
    return short.format_help()
