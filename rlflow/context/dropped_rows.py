"""Rows that a reward with `on_error: drop` failed on, and the values that later nodes get without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.values.columns import take_rows
from rlflow.values.each import Each
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.path import RowPath


def drop(places: Sequence[int], scored: Any, space: RowSpace, ranks: tuple[int, ...], transport: Transport) -> None:
    """Mark the rows of `scored` at these places as dropped, on all `ranks`; a collective of theirs.

    Args:
        places: Places of the rows among this rank's, from 0.
        scored: This rank's samples that a reward scored; one field is their `RowPath`.
        space: The rows that the scoring node sees; `space.dropped` is changed in place.
        ranks: Ranks of the node.
        transport: Collectives between these ranks.
    """
    (path,) = (value for value in vars(scored).values() if isinstance(value, RowPath))
    mine = on_host(path.numbers)[list(places)]
    of_ranks = transport.all_gather_ragged(mine.flatten(), ranks)
    space.drop(torch.cat([each.view(-1, path.depth) for each in of_ranks]))


def left_out(space: RowSpace, node: Node, spaces: Mapping[str, RowSpace], graph: Graph) -> Tensor | None:
    """`[N]` bool, the rows of `space` that `node` must not see because a reward it depends on dropped them; or None.

    It is None where the node depends on no scores, or nothing was dropped. Rows of another branch of the tree are not
    left out if they were made from the scores: the node that made them saw no dropped rows.

    Args:
        space: The rows.
        node: The node that sees them.
        spaces: All rows of the step, by name.
        graph: Graph of the module.
    """
    if not node.follows:
        return None
    out = space.dropped.clone()
    made_of = () if space.name == BATCH else graph.nodes[space.name].follows
    for name in node.follows:
        scored = spaces.get(name)  # a replay has the rows alone that the node sees, marked already
        if scored is None or scored is space or not scored.dropped.any():
            continue
        of_another_branch = space.levels_shared_with(scored) < min(len(space.levels), len(scored.levels))
        if not (of_another_branch and name in made_of):
            out |= space.dropped_with(scored)
    return out if out.any() else None


def without_dropped(value: Any, dropped: Tensor) -> Any:
    """A copy of `value` in which dropped rows have no token in `loss_mask`, and the group `NO_GROUP`.

    The rows stay, so shapes do not change. A value without these fields, such as a tensor, is returned as it is.

    Args:
        value: A value of `B` rows.
        dropped: `[B]` bool, on the CPU.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changed: dict[str, Any] = {}
    for name, column in vars(value).items():
        if isinstance(column, RowPath):
            changed[name] = dataclasses.replace(column, dropped=dropped)
        elif name == "loss_mask" and isinstance(column, Tensor):
            changed[name] = on_device(on_host(column) & ~dropped[:, None], column.device)
    return dataclasses.replace(value, **changed) if changed else value


def each_without(each: Each[Any], annotation: Any, dropped: Tensor) -> Each[Any]:
    """A copy of `each` without the rows where `dropped`, `[K]` bool on the CPU, is True; its `counts` are smaller."""
    kept = ~dropped
    parent, counts = on_host(each.parent)[kept], on_host(each.counts)
    counts = torch.zeros_like(counts).index_add(0, parent, torch.ones_like(parent))
    return Each(take_rows(each.values, annotation, kept.nonzero()[:, 0]), on_device(counts, each.counts.device))
