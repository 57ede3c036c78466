"""Rows that a node made: whose children they are, how long they are, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.dag.annotations import type_name
from rlflow.dag.node import Node
from rlflow.databuffer.rows import RowSpace, ancestors
from rlflow.errors import UserError
from rlflow.values.columns import columns
from rlflow.values.cuts import Cut
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged


@dataclass(frozen=True)
class NewRows:
    """What other ranks must know of the rows that a node made on one; all on the CPU.

    Attributes:
        path: `[B, depth]`: that of the parent, then the number among its children.
        lengths: `[B]`, response tokens.
        tokens: `[B]`, what a model reads of each row.
        versions: `[B]`, of the policy that generated it; -1 where none did.
    """

    path: Tensor
    lengths: Tensor
    tokens: Tensor
    versions: Tensor


def new_rows(node: Node, value: Any, above: RowSpace, layout: Layout, rank: int) -> NewRows:
    """The rows of `value`, children of those above them that the fronts of their paths name, in their order.

    Args:
        node: That made them.
        value: Of the type that the node is annotated with.
        above: The rows that the node saw.
        layout: Where these lie.
        rank: This one.

    Raises:
        UserError: The value has no paths, or a row descends from none of those that the node saw here.
    """
    if not isinstance(value, node.returns):
        raise UserError(
            f"node `{node.id}` returned {type(value).__name__} and is annotated {type_name(node.returns)}"
            f" ({node.place}); return that"
        )
    names = [column.name for column in columns(node.returns) if column.cut is Cut.PATH]
    path = getattr(value, names[0])
    if not isinstance(path, RowPath):
        raise UserError(
            f"node `{node.id}` returned rows on rank {rank} whose `{names[0]}` is {path!r}, so that none has a parent"
            f" ({node.place}); give each the path of a row of `{node.inside}`, or of one below it"
        )
    counts = _counts(value)
    bring_over([path.numbers, *counts.values()])
    depth = above.path.shape[1]
    if path.levels[:depth] != above.levels:
        raise UserError(
            f"node `{node.id}` returned rows of {' > '.join(path.levels)} on rank {rank} and sees rows of"
            f" {' > '.join(above.levels)}, so that none has a parent ({node.place}); return rows that are below those"
        )
    numbers = on_host(path.numbers)
    _require_parents(node, above, above.held(layout, rank), numbers[:, :depth], rank)
    on_cpu = {name: on_host(x).long() for name, x in counts.items()}
    none = torch.full((len(numbers),), -1)
    own = RowPath(numbers, path.levels).below(depth, node.id).numbers
    lengths = on_cpu.get("lengths", torch.zeros_like(none))
    tokens = on_cpu.get("tokens", lengths + on_cpu.get("prompts", 0))
    return NewRows(own, lengths, tokens, on_cpu.get("versions", none))


def _counts(value: Any) -> dict[str, Tensor]:
    """The numbers of each row that a value has, as they are: what is made of them is made on the host."""
    found: dict[str, Tensor] = {}
    lengths, prompts = getattr(value, "lengths", None), getattr(value, "prompt_ids", None)
    if isinstance(lengths, Tensor):
        found["lengths"] = lengths
    if isinstance(getattr(value, "tokens", None), Tensor):
        found["tokens"] = value.tokens
    elif isinstance(prompts, Ragged):
        found["prompts"] = prompts.lengths
    if isinstance(getattr(value, "version", None), Tensor):
        found["versions"] = value.version
    return found


def _require_parents(node: Node, above: RowSpace, held: Tensor, parents: Tensor, rank: int) -> None:
    """Refuse rows that descend from none of those at the positions `held`: paths `[B, depth]`."""
    position = ancestors(above.path, parents)
    orphans = ~torch.isin(position, held)
    if bool(orphans.any()):
        row = int(orphans.nonzero()[0])
        raise UserError(
            f"row {row} that node `{node.id}` returned on rank {rank} has the parent"
            f" {'.'.join(map(str, parents[row].tolist()))}, which is no row of `{node.inside}` that it reads there"
            f" ({node.place}); return rows that were made from those it reads"
        )
