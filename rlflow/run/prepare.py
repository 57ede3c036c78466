"""All that can be known, and refused, of a run before a process starts or a weight is loaded.

Fit, validation, `rlflow graph` and `rlflow simulate` have their graph, layouts and plan from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rlflow.dag.graph import Graph
from rlflow.dag.node import ROLLOUT
from rlflow.dag.planner import plan
from rlflow.data.loader import Loader
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.architecture import check_architecture
from rlflow.models.attention import check_sequence_parallel
from rlflow.models.causal_lm import CausalLM, WithoutAdapters
from rlflow.models.lora import require_peft
from rlflow.models.tiny import resolve_model
from rlflow.module import RLModule, chooses_prompts, handles, has_validation_step
from rlflow.process.status import refusing_exits
from rlflow.rollout.engine import RolloutEngine
from rlflow.run import checks
from rlflow.run.placement import followed_role, layouts
from rlflow.run.prepared import Planned, Prepared
from rlflow.run.pretrained import load_config, load_tokenizer, require_same_vocabulary, stop_tokens
from rlflow.settings import Settings
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout
from rlflow.workflow.binding import bind


def read_graph(module: RLModule) -> Graph:
    """The module's checked graph, its models configured but not loaded.

    Raises:
        UserError: A size is below 1, a model of the config cannot be, or the graph has problems; all are named.
    """
    for name in ("group_size", "max_response_length", "max_draws"):
        if (size := getattr(module, name)) < 1:
            raise UserError(f"`{name}` is {size}; give 1 or more")
    if not 0 < module.temperature < math.inf:
        raise UserError(f"`temperature` is {module.temperature}; it divides the logits, so give more than 0")
    module.configure_models()
    told = bind(module)
    return Graph.read(module, handles(module), told)


def plan_run(module: RLModule, settings: Settings, tensor_parallel_size: int) -> Planned:
    """Configure the module's models, and plan its graph on the ranks of the settings; nothing is read or loaded.

    Args:
        module: The algorithm; its `configure_models` is called, once.
        settings: Of the trainer.
        tensor_parallel_size: Ranks of one rollout engine.

    Raises:
        UserError: The graph has problems, or cannot be placed or planned so.
    """
    graph = read_graph(module)
    placed = layouts(module, graph, settings.machines, tensor_parallel_size, settings.placement)
    return planned(module, graph, placed, settings, settings.machines.world_size)


def planned(
    module: RLModule, graph: Graph, placed: Mapping[str, Layout], settings: Settings, world_size: int
) -> Planned:
    """Plan a graph whose roles are placed.

    Args:
        module: With its models configured.
        graph: Of the module.
        placed: By role.
        settings: Of the trainer.
        world_size: All ranks.

    Raises:
        UserError: It cannot be planned so.
    """
    follows = followed_role(module, graph)
    made = plan(graph, placed, world_size, follows, settings.max_staleness, settings.cuts_off)
    return Planned(graph, dict(placed), made, follows)


@refusing_exits()
def prepare(
    module: RLModule,
    data: PromptData,
    settings: Settings,
    strategy: TrainingStrategy,
    engine: RolloutEngine,
    scratch: Path,
) -> Prepared:
    """Check and plan a run.

    Args:
        module: The algorithm.
        data: Its prompts.
        settings: Of the trainer.
        strategy: How training is spread.
        engine: That generates.
        scratch: Folder for the embedded model.

    Raises:
        UserError: Something of this cannot work.
    """
    made = plan_run(module, settings, engine.tensor_parallel_size)
    graph, placed, lead = made.graph, made.layouts, made.lead
    checks.check_sides(module, graph, data)
    paths = {
        role: resolve_model(handles(module)[role].model, scratch, _said_by(module, role))
        for role in _loaded(module, graph)
    }
    for role, path in paths.items():
        config, handle = load_config(path), handles(module)[role]
        check_architecture(config, _said_by(module, role), isinstance(handle, CausalLM))
        if placed[role].copies > 1:
            check_sequence_parallel(config, placed[role].copies, role, strategy.packing)
        whole = strategy.packing and placed[role].copies == 1
        checks.check_experts(handle, role, config, made.follows, settings.cuts_off, whole)
    tokenizer = load_tokenizer(paths[lead])
    require_same_vocabulary(paths, lead, tokenizer)
    checks.require_end(made.plan, settings, chooses_prompts(module))
    ranks, seed = settings.machines.world_size, settings.seed
    held_out = None if settings.limit_val_batches is None else settings.limit_val_batches * data.prompts_per_step
    scores_validation = data.validation is not None and made.follows is not None and module.reward is not None
    if data.validation is not None and not scores_validation and not has_validation_step(module):
        raise UserError(checks.nothing_to_validate(module, made.follows))
    if data.validation is not None and has_validation_step(module):
        checks.require_one_place(module, paths, placed, lead)
    validation = None if data.validation is None else Loader(data.validation, data, tokenizer, seed, held_out, ranks)
    return Prepared(
        graph=graph,
        plan=made.plan,
        layouts=placed,
        follows=made.follows,
        module=module,
        data=data,
        settings=settings,
        strategy=strategy,
        engine=engine,
        paths=paths,
        tokenizer=tokenizer,
        stop_token_ids=stop_tokens(paths[lead], tokenizer, module.stop_token_ids),
        train=Loader(data.train, data, tokenizer, seed, ranks=ranks),
        validation=validation,
        generates=any(node.kind == "rollout" for node in graph.order) or scores_validation,
        scores_validation=scores_validation,
    )


def _said_by(module: RLModule, role: str) -> str:
    """The setting that names a role's model, such as `critic_path`."""
    model = handles(module)[role].model
    return next((f"`{name}`" for name, value in vars(module).items() if value == model), f"the model of `{role}`")


def _loaded(module: RLModule, graph: Graph) -> list[str]:
    """The roles that have a model, in the order of loading: views after those that they are views of."""
    found = handles(module)
    roles = [role for role in graph.roles() if role != ROLLOUT]
    used = [found[role] for role in roles]
    for role, handle in zip(roles, used, strict=True):
        if handle.lora is not None:
            require_peft()
        if isinstance(handle, WithoutAdapters) and handle.owner not in used:
            raise UserError(
                f"`{role}` is a model without its adapters, and no node uses the model with them; load `{role}` by"
                f" itself, as CausalLM({handle.model!r}, trainable=False)"
            )
    return sorted(roles, key=lambda role: isinstance(found[role], WithoutAdapters))
