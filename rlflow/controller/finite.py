"""An infinite or NaN number that a node makes on one rank ends all of its ranks, in one line that names the row."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from rlflow.dag.node import Node
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.values.columns import columns
from rlflow.values.cuts import Cut
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.layout import Layout


def require_finite(node: Node, value: Any, space: RowSpace, layout: Layout, transport: Transport) -> None:
    """Refuse infinite and NaN numbers of samples that a node without a role made; called by all its ranks.

    Args:
        node: That made the value.
        value: Of the type that the node is annotated with.
        space: The rows of the value.
        layout: Where they lie.
        transport: To the other ranks.

    Raises:
        UserError: There is one, on any rank: all raise it, with the sample of the lowest id.
    """
    if not node.makes_value or node.returns is Any:
        return
    numbers = _numbers(value, node.returns)
    if numbers is None:
        return
    found = []
    held = space.held(layout, transport.rank)
    broken = {name: ~x.detach().isfinite() for name, x in numbers.items()}
    bring_over(broken.values())  # the host waits for the device once
    for name, of_x in broken.items():
        here = on_host(of_x)
        rows = (here.flatten(1).any(dim=1) if here.dim() > 1 else here).nonzero()[:1, 0].tolist()
        found += [(int(space.ids[held[row]]), int(space.groups[held[row]]), name) for row in rows]
    ranks = transport.gather_bytes(json.dumps(found).encode() if found else b"", layout.ranks)
    of_all = [each for rank in ranks if rank for each in json.loads(rank)]
    if of_all:
        row, group, name = min(of_all)
        what = f"part `{name}` of `{node.id}`" if name else f"`{node.id}`"
        of = f" of prompt {group}" if group != row else ""
        raise UserError(
            f"{what} is infinite or NaN for row {row}{of} of the run ({node.place}); mend what made it, or mask the row"
        )


def _numbers(value: Any, annotation: Any) -> dict[str, Tensor] | None:
    """The floating point numbers of samples by the column's or part's name; None where the type has none."""
    found: dict[str, Tensor] = {}
    cuts = [column for column in columns(annotation) if column.cut in (Cut.SAMPLE, Cut.PARTS)]
    for column in cuts:
        data = getattr(value, column.name) if column.name else value
        parts = data if isinstance(data, dict) else {column.name: data}
        found |= {name: x for name, x in parts.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return found if cuts else None
