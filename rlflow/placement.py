"""The layout of each role's rows: which ranks hold them, in how many shards, dealt how."""

from __future__ import annotations

from rlflow.dag.graph import Graph
from rlflow.dag.node import ROLLOUT
from rlflow.data.layout import Layout
from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.module import RLModule


def handles(module: RLModule) -> dict[str, ModelHandle]:
    """The module's model handles by role, in the order of assignment."""
    return {name: value for name, value in vars(module).items() if isinstance(value, ModelHandle)}


def followed_role(module: RLModule, graph: Graph) -> str | None:
    """The role whose weights the rollout engine generates with: the first trained causal language model.

    None where none is trained and none generates.

    Raises:
        UserError: No node trains a model; or one samples, and none trains a model that can.
    """
    name, trained = type(module).__name__, graph.trained_roles()
    if not trained:
        raise UserError(f"no node of {name} trains a model; mark one @node(role=..., type='train')")
    for role in trained:
        if isinstance(handles(module).get(role), CausalLM):
            return role
    for node in graph.order:
        if node.kind == "rollout":
            raise UserError(
                f"node `{node.id}` of {name} samples, and no node trains a CausalLM whose weights it could sample with;"
                " add one, or learn from responses of a dataset"
            )
    return None


def layouts(module: RLModule, graph: Graph, world_size: int, tensor_parallel_size: int) -> dict[str, Layout]:
    """One layout for each role that a node of the graph uses, and for the rollout engine.

    Trained and scored roles hold balanced rows, a scored role those of the trained one, so nothing moves between them.

    Raises:
        UserError: The ranks do not divide into engines of `tensor_parallel_size`.
    """
    if world_size % tensor_parallel_size:
        raise UserError(
            f"`rollout.init_args.tensor_parallel_size` is {tensor_parallel_size}, which does not divide the"
            f" {world_size} ranks (trainer.devices x trainer.num_nodes); use one of {_divisors(world_size)}"
        )
    ranks = tuple(range(world_size))
    found = handles(module)
    trained = graph.trained_roles()
    first = found[trained[0]].samples_per_update if trained else None
    result = {ROLLOUT: Layout(ranks, world_size // tensor_parallel_size, "groups")}
    for role in found:
        samples_per_update = found[role].samples_per_update if role in trained else first
        result[role] = Layout(ranks, world_size, "balanced", samples_per_update)
    return result


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
