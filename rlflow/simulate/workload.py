"""What a step has to do at some number of ranks: graph, plan and sizes, read from a config's objects."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rlflow.dag.graph import Graph
from rlflow.dag.node import engine_of
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.memory.workload import Lengths, Workload, engine_here, loaded_role
from rlflow.models.causal_lm import Averaged, CausalLM, WithoutAdapters
from rlflow.models.sizes import size_of
from rlflow.module import RLModule, handles
from rlflow.rollout.assignment import EngineSettings
from rlflow.run.prepare import planned
from rlflow.settings import MOST_DEVICES, Settings
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout


def read_workload(
    module: RLModule,
    graph: Graph,
    data: PromptData,
    settings: Settings,
    strategy: TrainingStrategy | None,
    engines: EngineSettings,
    ranks: int,
    *,
    weak: bool,
    on_cpu: bool,
    prompt_tokens: float | None,
    response_tokens: float | None,
) -> Workload:
    """The step of a config on `ranks` ranks.

    Args:
        module: The algorithm, with its models configured; it stays as it is.
        graph: Of the module.
        data: Its prompts; only their number and lengths are read.
        settings: Of the trainer.
        strategy: Of the trainer; None for the one that a run would take.
        engines: What generates, as configured.
        ranks: To be simulated.
        weak: Whether the step's prompts and updates grow with the ranks; else they are the config's.
        on_cpu: Whether the ranks run on CPUs.
        prompt_tokens: Of a prompt on average; None for half of what the config allows.
        response_tokens: Of a response on average; None for half of what the config allows.

    Raises:
        UserError: The sizes do not divide, a length is beyond the config's, or a model's size is unknown.
    """
    world = settings.machines.world_size
    share = ranks / world if weak else 1.0
    module = _of_size(module, share, ranks)
    prompts = _scaled("prompts_per_step", data.prompts_per_step, share, ranks)
    if settings.placement:
        made = planned(module, graph, settings, engines, ranks, partial(_spread, world=world, ranks=ranks))
    else:
        devices = math.gcd(ranks, MOST_DEVICES)
        machines = replace(settings, num_nodes=ranks // devices, devices=devices)
        made = planned(module, graph, machines, engines, ranks)
    placed, assigned = made.layouts, made.engines
    smallest = min((placed[engine_of(name)].shards for name in graph.policies()), default=ranks)
    if prompts < smallest:
        raise UserError(
            f"`data.prompts_per_step` is {prompts} for {smallest} shards on {ranks} ranks, so some would have nothing"
            " to do; raise it, or simulate fewer nodes"
        )
    samples = prompts * module.group_size
    models = handles(module)
    roles = {
        name: loaded_role(
            name,
            models,
            size_of(models[name].model, models[name].trust_remote_code),
            strategy or _default_strategy(world, placed[name]),
            placed[name],
            samples,
            on_cpu,
        )
        for name in dict.fromkeys([*graph.roles(), *graph.policies()])
    }
    policies = {name: roles.pop(name) for name in graph.policies() if name not in graph.roles()}
    for name in graph.policies() or ([made.follows] if made.follows else []):
        followed, tensor_parallel_size = (roles | policies)[name].size, assigned[name].tensor_parallel_size
        if not followed.heads % tensor_parallel_size:
            continue
        raise UserError(
            f"`rollout.init_args.tensor_parallel_size` is {tensor_parallel_size}, which does not divide the model's"
            f" {followed.heads} attention heads; use a divisor"
        )
    longest = module.max_response_length if graph.policies() else data.max_response_length
    lengths = _lengths(data.max_prompt_length, longest or module.max_response_length, prompt_tokens, response_tokens)
    generates = next(iter(graph.policies()), None)
    return Workload(
        graph=graph,
        plan=made.plan,
        ranks=ranks,
        roles=roles,
        follows=generates,
        engines={
            name: engine_here(engine, placed[engine_of(name)], (roles | policies)[name], lengths, samples, on_cpu)
            for name, engine in assigned.own.items()
            if generates
        },
        prompts=prompts,
        group_size=module.group_size,
        lengths=lengths,
        moves_rows=settings.balancing.mode != "off",
        policies=policies,
    )


def _of_size(module: RLModule, share: float, ranks: int) -> RLModule:
    """A copy whose updates have so many times the samples."""
    scaled, found = copy.copy(module), handles(module)
    copies = {role: copy.copy(handle) for role, handle in found.items()}
    for role, handle in copies.items():
        if handle.samples_per_update is not None:
            handle.samples_per_update = _scaled("samples_per_update", handle.samples_per_update, share, ranks)
        if isinstance(handle, WithoutAdapters | Averaged):
            owner = next(copies[name] for name, other in found.items() if other is handle.owner)
            assert isinstance(owner, CausalLM)
            handle.owner = owner
        setattr(scaled, role, handle)
    return scaled


def _scaled(name: str, size: int, share: float, ranks: int) -> int:
    scaled = size * share
    if abs(scaled - round(scaled)) > 1e-9 or round(scaled) < 1:
        raise UserError(
            f"`{name}` is {size}, which on {ranks} ranks would be {scaled:g}, in proportion to the config's ranks;"
            " choose `--nodes` that divide it, or give `--scaling strong`"
        )
    return round(scaled)


def _spread(placed: Mapping[str, Layout], *, world: int, ranks: int) -> dict[str, Layout]:
    """Where roles live: as the config places them, each of its ranks standing for as many as there are more."""
    return {role: _spread_role(role, layout, world, ranks) for role, layout in placed.items()}


def _spread_role(role: str, layout: Layout, world: int, ranks: int) -> Layout:
    more, fewer = max(1, ranks // world), max(1, world // ranks)
    spread = tuple(
        sorted({place for rank in layout.ranks for place in range(rank // fewer * more, (rank // fewer + 1) * more)})
    )
    if world * more != ranks * fewer or len(spread) * fewer != len(layout.ranks) * more or len(spread) % layout.copies:
        raise UserError(
            f"`placement.{role}` names {len(layout.ranks)} of {world} ranks, of which {ranks} cannot be made in"
            " proportion; simulate a multiple of the config's ranks"
        )
    return replace(layout, ranks=spread, shards=len(spread) // layout.copies)


def _lengths(longest_prompt: int, longest: int, prompt: float | None, response: float | None) -> Lengths:
    for name, value, most in (("prompt_tokens", prompt, longest_prompt), ("response_tokens", response, longest)):
        if value is not None and not 0 < value <= most:
            raise UserError(f"`--{name}` is {value:g}, and the config allows up to {most} tokens; give 1 to {most}")
    return Lengths(prompt or longest_prompt / 2, response or longest / 2, longest_prompt, longest)


def _default_strategy(world: int, layout: Layout) -> TrainingStrategy:
    return SingleProcess() if world == 1 and len(layout.ranks) == 1 else DeepSpeedStrategy()
