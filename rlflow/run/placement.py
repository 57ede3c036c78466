"""Layouts of roles from `placement`: the ranks that hold a role's rows, the shards, and how rows are distributed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlflow.dag.graph import Graph
from rlflow.dag.node import ROLLOUT, engine_of
from rlflow.dag.tasks import rank_ranges
from rlflow.errors import UserError, did_you_mean
from rlflow.models.causal_lm import EMA, CausalLM, WithoutAdapters
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule, aggregation_of, handles
from rlflow.settings import Place, Placed
from rlflow.values.layout import Layout


def followed_role(module: RLModule, graph: Graph) -> str | None:
    """The first language model that is trained: validation generates with it, and its tokenizer reads the data.

    None where no language model is trained.

    Raises:
        UserError: No node trains a model; or a rollout node names no policy, and no `CausalLM` is trained.
    """
    name, trained = type(module).__name__, graph.trained_roles()
    if not trained:
        raise UserError(f"no node of {name} trains a model; mark one @node(role=..., type='train')")
    for role in trained:
        if isinstance(handles(module).get(role), CausalLM):
            return role
    for node in graph.order:
        if node.kind == "rollout" and not node.generates:
            raise UserError(
                f"node `{node.id}` of {name} samples, and no node trains a CausalLM whose weights it could sample with;"
                " add one, or learn from responses of a dataset"
            )
    return None


def layouts(
    module: RLModule,
    graph: Graph,
    world_size: int,
    tensor_parallel_sizes: Mapping[str, int],
    placement: Mapping[str, Placed] | None = None,
) -> dict[str, Layout]:
    """A layout for each model of the module, and for the engines of each policy under its `engine_of` name.

    With 4 ranks, engines of 2 ranks each, `samples_per_update` 512 and `placement: {rollout: 0-1, actor: 2-3}`:

        {"actor.rollout": Layout((0, 1), 1), "actor": Layout((2, 3), 2, "balanced", 512)}

    Trained and scored roles hold balanced rows; a scored role on the ranks of the first trained one has the same
    layout, so nothing moves between them.

    Args:
        module: The algorithm, with its models configured.
        graph: Graph of the module.
        world_size: Number of all ranks.
        tensor_parallel_sizes: Number of ranks that share an engine, by policy that generates.
        placement: Ranks by role; `actor.rollout` for the engines of `actor`, `rollout` for those of policies that are
            not named. A role that is not named lives on all ranks.

    Raises:
        UserError: `placement` names an unknown role, or ranks that do not exist; ranks do not divide into engines, or
            into groups that share a layer or a sequence; or a role lives on some of an engine's ranks and not on
            others.
    """
    found = handles(module)
    places = {
        role: written if isinstance(written, Place) else Place(written) for role, written in (placement or {}).items()
    }
    engines = {policy: engine_of(policy) for policy in tensor_parallel_sizes}
    for role in places:
        if role not in {ROLLOUT, *engines.values(), *found}:
            known = [ROLLOUT, *engines.values(), *found]
            raise UserError(
                f"`placement.{role}` names no role of {type(module).__name__}; its roles are"
                f" {', '.join(known)}.{did_you_mean(role, known)}"
            )
        if isinstance(found.get(role), WithoutAdapters | EMA):
            what = "a model without its adapters" if isinstance(found[role], WithoutAdapters) else "a moving average"
            raise UserError(
                f"`placement.{role}` is set, and `{role}` is {what}, which lives where the model does; place the model"
            )
    trained = graph.trained_roles()
    result = {}
    for policy, name in engines.items():
        written = name if name in places else ROLLOUT
        result[name] = _of_engine(written, places.get(written, Place()), world_size, tensor_parallel_sizes[policy])
    for role, handle in found.items():
        updated = handle if role in trained or not trained else found[trained[0]]
        whole_episodes = updated.samples_per_update is not None and aggregation_of(module, updated) == "episode-mean"
        of = owner_of(role, found)
        if of not in places and of == role:
            of = next((node.role for node in graph.order if role in node.uses and node.role in found), of)
        place = places.get(of, Place())
        ranks = _ranks(of, place, world_size)
        shards = _shards(of, place, ranks)
        sizes = place.tensor_parallel_size, place.expert_parallel_size
        result[role] = Layout(ranks, shards, "balanced", updated.samples_per_update, whole_episodes, *sizes)
    _bring_together(result, graph)
    for name in engines.values():
        _refuse_torn_engines(name, result, graph)
    return result


def _shards(role: str, place: Place, ranks: tuple[int, ...]) -> int:
    """Number of shards of rows that the ranks of a role hold; ranks that share rows count as one."""
    count = len(ranks)
    if (size := place.expert_parallel_size) < 1 or count % size:
        raise UserError(
            f"`placement.{role}.expert_parallel_size` is {size}, which does not divide the {count} ranks of `{role}`;"
            f" use one of {_divisors(count)}"
        )
    for name in ("tensor_parallel_size", "sequence_parallel_size"):
        size = getattr(place, name)
        if size < 1 or count % size:
            groups = "" if count == len(ranks) else f" in groups of {place.tensor_parallel_size}"
            raise UserError(
                f"`placement.{role}.{name}` is {size}, which does not divide the {len(ranks)} ranks of"
                f" `{role}`{groups}; use one of {_divisors(count)}"
            )
        count //= size
    return count


def _bring_together(placed: dict[str, Layout], graph: Graph) -> None:
    """Give models in a node's `uses` the layout of its role, or raise `UserError` if they are placed differently."""
    for node in graph.order:
        for used in node.uses:
            role = str(node.role)
            here, there = placed[role], placed[used]
            alike = ("ranks", "shards", "tensor_parallel_size", "expert_parallel_size")
            if any(getattr(here, of) != getattr(there, of) for of in alike):
                raise UserError(
                    f"node `{node.id}` of `{role}` uses `{used}`, and `placement` has {_described(here)} for `{role}`"
                    f" and {_described(there)} for `{used}`; place both alike"
                )
            placed[used] = here


def _described(layout: Layout) -> str:
    layers = "" if layout.tensor_parallel_size == 1 else f", {layout.tensor_parallel_size} to a layer"
    experts = "" if layout.expert_parallel_size == 1 else f", {layout.expert_parallel_size} to the experts of a layer"
    return f"{rank_ranges(layout.ranks)} in {layout.shards} shard{'s' if layout.shards > 1 else ''}{layers}{experts}"


def owner_of(role: str, found: Mapping[str, ModelHandle]) -> str:
    """The role whose view or average `role` is; `role` itself if it has weights of its own."""
    handle = found[role]
    if not isinstance(handle, WithoutAdapters | EMA):
        return role
    return next((name for name, other in found.items() if other is handle.owner), role)


def _of_engine(name: str, place: Place, world_size: int, tensor_parallel_size: int) -> Layout:
    ranks = _ranks(name, place, world_size)
    for setting in ("sequence_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
        if (size := getattr(place, setting)) != 1:
            raise UserError(
                f"`placement.{name}.{setting}` is {size}; engines share their work by"
                " `rollout.init_args.tensor_parallel_size`"
            )
    if len(ranks) % tensor_parallel_size:
        of = "ranks (trainer.devices x trainer.num_nodes)" if len(ranks) == world_size else "rollout ranks"
        raise UserError(
            f"`rollout.init_args.tensor_parallel_size` is {tensor_parallel_size}, which does not divide the"
            f" {len(ranks)} {of}; use one of {_divisors(len(ranks))}"
        )
    return Layout(ranks, len(ranks) // tensor_parallel_size, "groups")


def _ranks(role: str, place: Place, world_size: int) -> tuple[int, ...]:
    """The ranks that a place names, ascending: `[0, "2-3"]` gives `(0, 2, 3)`; all ranks if it names none."""
    if place.ranks is None:
        return tuple(range(world_size))
    ranks: set[int] = set()
    for each in place.ranks if isinstance(place.ranks, list) else [place.ranks]:
        read = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(each))
        if read is None:
            raise UserError(
                f'`placement.{role}` names the ranks {each!r}; write numbers and ranges, such as 0 or "2-3"'
            )
        low, high = int(read[1]), int(read[2] or read[1])
        if high >= world_size or low > high:
            raise UserError(
                f"`placement.{role}` names the ranks {each}, and the run has the ranks 0 to {world_size - 1}"
                " (trainer.devices x trainer.num_nodes); name those, or start more"
            )
        ranks.update(range(low, high + 1))
    if not ranks:
        raise UserError(f"`placement.{role}` names no ranks; name some, or leave `{role}` out for all")
    return tuple(sorted(ranks))


def _refuse_torn_engines(name: str, placed: Mapping[str, Layout], graph: Graph) -> None:
    """Raise `UserError` if a role is on some ranks of an engine but not on all: they must do the same work together."""
    engine = placed[name]
    for role in graph.roles():
        for shard in range(engine.shards):
            group = engine.peers(shard)
            inside = [rank for rank in group if rank in placed[role].ranks]
            if 0 < len(inside) < len(group):
                raise UserError(
                    f"`placement` splits a rollout engine's ranks: {rank_ranges(group)} share an engine"
                    f" (`rollout.init_args.tensor_parallel_size` {engine.copies}), and among them only"
                    f" {rank_ranges(tuple(inside))} hold `{role}`; place `{role}` on all of them or on none"
                )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
