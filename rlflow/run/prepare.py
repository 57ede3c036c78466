"""Checks and plans a run before any process starts or weight is loaded.

Fit, validation, `rlflow graph` and `rlflow simulate` get their graph, layouts and plan here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlflow.checkpoint.stored_groups import SURPLUS, UNFINISHED
from rlflow.controller.run import Run, RunPlan
from rlflow.dag.graph import Graph
from rlflow.dag.node import ROLLOUT, engine_of
from rlflow.dag.planner import plan
from rlflow.data.loader import Loader
from rlflow.data.mixture import settings_of
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError, about, setting
from rlflow.models.architecture import check_architecture
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.causal_lm import EMA, CausalLM, WithoutAdapters
from rlflow.models.expert_parallel import check_expert_parallel
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import require_peft
from rlflow.models.model_arguments import make_models, model_parameters
from rlflow.models.picture_processor import PictureProcessor, reads_pictures
from rlflow.models.tensor_parallel import check_tensor_parallel
from rlflow.models.tiny import resolve_model
from rlflow.module import RLModule, chooses_prompts, environments, handles, has_validation_step
from rlflow.process.status import refusing_exits
from rlflow.rollout.assignment import EngineSettings, Share
from rlflow.run import preflight
from rlflow.run.optimizers import configure_optimizers
from rlflow.run.placement import followed_role, layouts, owner_of
from rlflow.run.pretrained import load_config, load_tokenizer, loading, require_same_vocabulary, stop_tokens
from rlflow.run.schedules import check_schedules
from rlflow.settings import Settings
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout
from rlflow.values.response_settings import ResponseSettings
from rlflow.workflow import bind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def read_graph(module: RLModule, of_datasets: Mapping[str, ResponseSettings] = MappingProxyType({})) -> Graph:
    """The module's checked graph, its models configured but not loaded.

    Args:
        module: The algorithm; its `configure_models` is called once.
        of_datasets: Response settings of the datasets that are trained on, by name; models then read columns of these.

    Raises:
        UserError: A size is below 1, a model of the config is impossible, or the graph has problems, which are listed.
    """
    for name in ("group_size", "max_response_length", "max_draws"):
        if (size := getattr(module, name)) < 1:
            raise UserError(f"`{name}` is {size}; give 1 or more", of=module)
    configure(module)
    own = [each.sampling for each in of_datasets.values() if each.sampling is not None]
    for handle in handles(module).values():
        if isinstance(handle, CausalLM):
            handle.reads_temperature = bool(own)
            handle.reads_support |= any(own)
    bind(module)
    return graph_of(module)


def graph_of(module: RLModule) -> Graph:
    """The checked graph of a module whose models are configured.

    Raises:
        UserError: The graph has problems, which are listed.
    """
    models = handles(module)
    policies = [name for name, of in models.items() if isinstance(of, CausalLM)]
    averages = {name: owner_of(name, models) for name, of in models.items() if isinstance(of, EMA)}
    drops = module.scorer is not None and module.scorer.drops
    return Graph.read(module, models, policies, averages, drops)


def configure(module: RLModule) -> None:
    """Give a module the models of a run, and call its `configure_models`.

    Models that the constructor was given are copied, since a run changes them. Models that `configure_models` derives
    from these are made again. A model from the config replaces one of the same name that the constructor was given or
    that `configure_models` makes.

    Raises:
        UserError: The constructor was given something other than a model, or a model has a wrong name.
    """
    make_models(module)
    given, of_run = dict(module.given_models), module.run_models
    for role, handle in handles(module).items():
        if handle is not of_run.get(role):
            given[role] = handle
        elif role in given:
            given[role] = _as_changed(given[role], handle, module.run_settings[role])
        else:
            setattr(module, role, None)
    module.given_models = given
    for role in module.config_models:
        _check_name(module, role)
    chosen = {role: copy(handle) for role, handle in (given | dict(module.config_models)).items()}
    copies = {id(handle): chosen[role] for role, handle in given.items()}
    for role, handle in chosen.items():
        if isinstance(handle, EMA | WithoutAdapters) and id(handle.owner) in copies:
            owner = copies[id(handle.owner)]
            assert isinstance(owner, CausalLM)
            handle.owner = owner
        setattr(module, role, handle)
    module.configure_models()
    for role in module.config_models:
        setattr(module, role, chosen[role])
    module.run_models = handles(module)
    if of_checkpoint := module.run_models.keys() & {"state", SURPLUS, UNFINISHED}:
        raise UserError(
            f"a model of {type(module).__name__} is called `{min(of_checkpoint)}`, the name of another file of"
            " checkpoints; give it another name, such as `actor`"
        )
    language = [handle for handle in module.run_models.values() if isinstance(handle, CausalLM)]
    for handle in language:
        handle.reads_support = any(each.trains_on_support for each in language)
    module.run_settings = {role: _settings(handle) for role, handle in module.run_models.items()}


def _settings(handle: ModelHandle) -> dict[str, Any]:
    """The settings of a model that only a user changes; the run may freeze it, which removes its optimizer."""
    names = set(signature(type(handle)).parameters) - {"trainable", "owner"}
    if handle.optimizer is None:
        names.discard("optimizer")
    return {name: value for name, value in vars(handle).items() if name in names}


def _as_changed(given: ModelHandle, of_run: ModelHandle, before: Mapping[str, Any]) -> ModelHandle:
    """The model as given, with the settings that were changed on its copy since the previous run was configured."""
    changed = {name: value for name, value in _settings(of_run).items() if value is not before.get(name)}
    if not changed:
        return given
    model = copy(given)
    for name, value in changed.items():
        setattr(model, name, value)
    return model


def _check_name(module: RLModule, role: str) -> None:
    known = role in model_parameters(type(module)) or not hasattr(type(module), role)
    taken = not known or not isinstance(vars(module).get(role), ModelHandle | None)
    if not role.isidentifier() or role == ROLLOUT or taken:
        why = f"`{role}` of {type(module).__name__} is something else" if taken else "that is not a name for a model"
        raise UserError(f"`models.{role}` is given, and {why}; give the model another name, such as `actor`")


def plan_run(
    module: RLModule,
    settings: Settings,
    engines: EngineSettings,
    of_datasets: Mapping[str, ResponseSettings] = MappingProxyType({}),
) -> RunPlan:
    """Configure the module's models, and plan its graph on the ranks of the settings; nothing is read or loaded.

    Args:
        module: The algorithm; its `configure_models` is called once.
        settings: Settings of the trainer.
        engines: Settings of the engines.
        of_datasets: Response settings of the datasets that are trained on, by name.

    Raises:
        UserError: The graph has problems, or cannot be placed or planned with these settings.
    """
    return planned(module, read_graph(module, of_datasets), settings, engines, settings.world_size)


def planned(
    module: RLModule,
    graph: Graph,
    settings: Settings,
    engines: EngineSettings,
    world_size: int,
    measures: bool = True,
    spread: Callable[[dict[str, Layout]], dict[str, Layout]] = dict,
) -> RunPlan:
    """Place a graph's roles and plan it.

    Args:
        module: Module with its models configured.
        graph: Graph of the module.
        settings: Settings of the trainer.
        engines: Settings of the engines.
        world_size: Number of all ranks.
        measures: Whether the run may generate outside of its graph, to validate or to predict.
        spread: Function from the layouts of the settings to those on `world_size` ranks.

    Raises:
        UserError: The graph cannot be placed or planned with these settings.
    """
    follows = followed_role(module, graph)
    names = _generating_policies(graph, follows, settings, engines, measures)
    assigned = engines.assigned(names)
    for node in graph.order:
        assigned.refuse_together(node.id, node.generates)
    sizes = {name: assigned[name].tensor_parallel_size for name in names}
    placed = spread(layouts(module, graph, settings.world_size, sizes, settings.placement))
    made = plan(graph, placed, world_size, settings.max_staleness, settings.cuts_off, assigned.shared)
    _require_together(graph, placed, settings.max_staleness)
    return RunPlan(graph, placed, made, assigned, follows)


def _require_together(graph: Graph, placed: Mapping[str, Layout], max_staleness: int) -> None:
    """Refuse steps that overlap if no rank knows all of their rows that a checkpoint needs."""
    engines = {placed[engine_of(policy)].ranks: policy for policy in graph.policies()}
    if max_staleness and len(engines) > 1:
        raise UserError(
            f"`trainer.max_staleness` is {max_staleness}, and `placement` has {' and '.join(engines.values())} generate"
            " on ranks of their own, so a checkpoint could not hold a step that is generated ahead; place their engines"
            " on the same ranks, or set `trainer.max_staleness` to 0"
        )


def _generating_policies(
    graph: Graph, follows: str | None, settings: Settings, engines: EngineSettings, measures: bool
) -> list[str]:
    """All policies that have an engine: those of the graph, in order, and the one with which validation generates."""
    policies = graph.policies()
    if follows is None:
        return [*policies]
    named = {*engines.exceptions, *(each.share for each in engines.exceptions.values() if isinstance(each, Share))}
    is_named = follows in named or engine_of(follows) in (settings.placement or {})  # these settings stay legal
    return list(dict.fromkeys((*policies, *([follows] if measures or is_named or not policies else []))))


def scores_held_out(module: RLModule, data: PromptData) -> bool:
    """Whether validation has held-out prompts, and a reward that scores responses to them."""
    return data.validation is not None and (module.reward is not None or bool(environments(module)))


@refusing_exits()
def prepare(
    module: RLModule,
    data: PromptData,
    settings: Settings,
    strategy: TrainingStrategy,
    engines: EngineSettings,
    scratch: Path,
    trains: bool = True,
) -> Run:
    """Check and plan a run.

    Args:
        module: The algorithm.
        data: Prompts of the algorithm.
        settings: Settings of the trainer.
        strategy: Strategy that divides training over ranks.
        engines: Settings of the engines.
        scratch: Folder for the embedded model `tiny`.
        trains: Whether steps run on `data.train`; else the model is only measured, or only writes responses.

    Raises:
        UserError: A setting cannot work, by itself or with others.
    """
    of_datasets = settings_of(data.train) if trains else {}
    graph = read_graph(module, of_datasets)
    found = list(environments(module).values())
    measures = not trains or scores_held_out(module, data)
    made = planned(module, graph, settings, engines, settings.world_size, measures)
    placed, lead = made.layouts, made.lead
    if unknown := [name for name in settings.dump_nodes if name not in graph.nodes]:
        raise UserError(
            f"`trainer.dump_nodes` names {unknown[0]!r}, which is not a node; name one of {', '.join(graph.nodes)}"
        )
    names = _generating_policies(graph, made.follows, settings, engines, measures)
    preflight.check_hooks(module, graph)
    data = preflight.resolved(data, module, graph, trains)
    paths = {role: model_path(module, role, scratch) for role in _loaded(module, graph)}
    policies = {name: paths.get(name) or model_path(module, name, scratch) for name in names}
    configs = {name: _model_config(module, name, path) for name, path in (paths | policies).items()}
    if any(map(reads_pictures, configs.values())):  # models with a tower read a further column of rows
        for name, config in configs.items():
            handles(module)[name].reads_pictures = reads_pictures(config)
        made = planned(module, graph_of(module), settings, engines, settings.world_size, measures)
        graph = made.graph
    for role in paths:
        handle, config = handles(module)[role], configs[role]
        layers, sequences = placed[role].tensor_parallel_size, placed[role].sequence_parallel_size
        with about(handle):
            check_tensor_parallel(config, layers, role, handle)
            check_expert_parallel(config, placed[role].expert_parallel_size, layers, role)
        check_sequence_parallel(config, sequences, role, strategy.forward_plan.packing, layers)
        whole = strategy.forward_plan.packing and sequences == 1
        preflight.check_experts(handle, role, config, names, settings.cuts_off, whole)
    support_bounds = preflight.support_bounds(module, graph, of_datasets) if trains else {}
    made.engines.check_shared(configs, {name: placed[engine_of(name)] for name in names})
    preflight.check_aggregations(module, graph)
    configure_optimizers(module, {role: paths[role] for role in graph.trained_roles()}, strategy.dtype)
    check_schedules(module, graph, data.prompts_per_step)
    tokenizers = _tokenizers(module, policies | paths, lead)
    tokenizer = tokenizers[lead]
    processor = _processor(module, configs, (policies | paths)[lead], lead, tokenizer)
    preflight.check_choice(module, data, graph)
    module.data_curriculum = None if data.curriculum is None else data.curriculum.begun(data.prompts_per_step)
    preflight.require_end(made.plan, settings, chooses_prompts(module))
    ranks, seed = settings.world_size, settings.seed
    limit = None if settings.limit_val_batches is None else settings.limit_val_batches * data.prompts_per_step
    environment = found[0] if len(found) == 1 else None
    scores_validation = made.follows is not None and scores_held_out(module, data)
    preflight.check_response_settings(
        module,
        settings,
        train=(settings_of(data.train), bool(graph.policies()) or not trains),
        validation=(settings_of(data.validation), scores_validation),
    )
    of_lead = [node for node in preflight.learns_from_batch(graph) if node.role == lead]
    loss_node = None if has_validation_step(module) else next(iter(of_lead), None)
    if data.validation is not None and has_validation_step(module):
        preflight.require_one_place(module, paths, placed, lead)
    elif data.validation is not None and not scores_validation and loss_node is None:
        raise UserError(preflight.nothing_to_validate(module, made.follows))
    samples = any(node.kind == "rollout" for node in graph.order)
    scorer = module.scorer if samples else None
    validation = None
    if data.validation is not None:
        scored_by = module.scorer if scores_validation else None
        held_out = preflight.held_out(data, data.validation, module, loss_node)
        read = held_out, tokenizer, seed, limit, ranks, environment, scored_by, processor
        validation = Loader(data.validation, *read, validates=True)
    return Run(
        graph=graph,
        plan=made.plan,
        layouts=placed,
        follows=made.follows,
        module=module,
        data=data,
        settings=replace(settings, run_dir=str(Path(settings.run_dir).absolute())),
        strategy=strategy,
        engines=made.engines,
        paths=_absolute(paths),
        policies=_absolute(policies),
        configs=configs,
        support_bounds=support_bounds,
        tokenizer=tokenizer,
        stop_token_ids={
            name: stop_tokens(path, tokenizers.get(name, tokenizer), module.stop_token_ids)
            for name, path in policies.items()
        },
        train=Loader(data.train, data, tokenizer, seed, None, ranks, environment, scorer, processor),
        validation=validation,
        generates=samples or scores_validation,
        scores_validation=scores_validation,
        loss_node=loss_node,
    )


def model_path(module: RLModule, role: str, scratch: Path) -> Path:
    """The place of a role's weights and tokenizer: a folder, or a Hugging Face name.

    Args:
        module: Module with its models configured.
        role: Role of the model.
        scratch: Folder for the embedded model `tiny`, and for models of checkpoints.

    Raises:
        UserError: The role's `model` is neither.
    """
    handle = handles(module)[role]
    with about(handle):
        return resolve_model(handle.model, scratch, _setting_of(module, role), role)


def _absolute(paths: Mapping[str, Path]) -> dict[str, Path]:
    """The paths, made absolute if they are folders, since code of the user may call `os.chdir`."""
    return {role: path.absolute() if path.is_dir() else path for role, path in paths.items()}


def _model_config(module: RLModule, role: str, path: Path) -> PretrainedConfig:
    """The configuration of a role's model, after a check that such a model can be trained or scored."""
    handle = handles(module)[role]
    with about(handle):
        config = load_config(path, handle.trust_remote_code)
        with loading("architecture", path, handle.trust_remote_code):
            check_architecture(
                config, _setting_of(module, role), isinstance(handle, CausalLM), handle.trust_remote_code
            )
    return config


def _processor(
    module: RLModule,
    configs: Mapping[str, PretrainedConfig],
    path: Path,
    lead: str,
    tokenizer: PreTrainedTokenizerBase,
) -> PictureProcessor | None:
    """The processor of the lead, if that reads pictures; its placeholder is noted for models that read text alone.

    Raises:
        UserError: There is none, or another model reads pictures in another way.
    """
    if not reads_pictures(configs[lead]):
        return None
    with about(handles(module)[lead]):
        processor = PictureProcessor.load(path, configs[lead], tokenizer)
    for role, config in configs.items():
        if not reads_pictures(config):
            handles(module)[role].unread_placeholder = processor.placeholder_id
        elif config.model_type != configs[lead].model_type:
            raise UserError(
                f"`{role}` is of the type {config.model_type!r} and `{lead}` of the type {configs[lead].model_type!r},"
                " and an image has other tokens in each; give models of one type"
            )
    return processor


def _tokenizers(module: RLModule, paths: Mapping[str, Path], lead: str) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of the lead and of roles with another model, after a check that all have the same vocabulary."""
    found: dict[str, PreTrainedTokenizerBase] = {}
    for role, path in paths.items():
        handle = handles(module)[role]
        if role == lead or path != paths[lead]:
            with about(handle):
                found[role] = load_tokenizer(path, handle.trust_remote_code)
    require_same_vocabulary(paths, lead, found)
    return found


def _setting_of(module: RLModule, role: str) -> str:
    """Name of the setting for a role's model: its place in the config, or `critic.model` if it is not in the config."""
    return setting(handles(module)[role], "model", f"{role}.model")


def _loaded(module: RLModule, graph: Graph) -> list[str]:
    """The roles that have a model, in the order of loading: views and averages after the models that they follow."""
    found = handles(module)
    roles = list(graph.roles())
    used = [found[role] for role in roles]
    for role, handle in zip(roles, used, strict=True):
        if handle.lora is not None:
            require_peft()
        if isinstance(handle, WithoutAdapters) and handle.owner not in used:
            raise UserError(
                f"`{role}` is a model without its adapters, and no node uses the model with them; load `{role}` by"
                f" itself, as CausalLM({handle.model!r}, trainable=False)"
            )
        if isinstance(handle, EMA) and handle.owner not in [found[trained] for trained in graph.trained_roles()]:
            raise UserError(
                f"`{role}` is the moving average of a model that no node trains, so it never moves; train that one, or"
                f" load `{role}` by itself, as CausalLM({handle.model!r}, trainable=False)"
            )
    for node in graph.order:
        for name in node.uses:
            if found[name].trainable:
                raise UserError(
                    f"node `{node.id}` uses `{name}`, which is trainable, and no node trains it; set `trainable` to"
                    " false where it is made"
                )
    return sorted(roles, key=lambda role: isinstance(found[role], WithoutAdapters | EMA))
