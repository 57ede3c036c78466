"""What goes over from the ranks that run ahead to those that train: where steps overlap, a checkpoint keeps it."""

from __future__ import annotations

import torch

from rlflow.controller.in_step import InStep
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Load, RunNode, TrainNode
from rlflow.data.kept import Kept, KeptValue
from rlflow.data.rows import ARRAYS, RowSpace


class Crossing:
    """The values that cross, and the rows that they are of.

    Args:
        graph: Of the module.
        plan: Of all ranks.

    Attributes:
        tasks: What brings them over, in the global order.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.tasks = plan.crossing()
        self._graph = graph
        self._layouts = plan.layouts()
        behind = {task.node_id for task in plan.every() if isinstance(task, RunNode | TrainNode) and task.lag}
        ahead = [task for task in plan.every() if isinstance(task, Load | RunNode) and not task.lag]
        self._ranks = {rank for task in ahead for rank in task.ranks}
        runs = [task.node_id for task in ahead if isinstance(task, RunNode)]
        read = {name for node in behind for name in graph.nodes[node].reads}
        self._names = [name for name in (BATCH, *runs) if name in read]
        self._spaces = [BATCH, *(name for name in runs if graph.nodes[name].samples)]

    def made_on(self, rank: int) -> bool:
        """Whether `rank` runs ahead."""
        return bool(self.tasks) and rank in self._ranks

    def of(self, now: InStep, rank: int) -> Kept:
        """What `rank`, which runs ahead, made of a step."""
        values = {}
        for name in self._names:
            layout, space = self._layouts[name], self._graph.space_of(name)
            if space in now.spaces:
                rows = now.buffer.get(name, layout) if rank in layout.ranks else None
                values[name] = KeptValue(self._graph.type_of(name), space, layout, now.lengths_of(name, space), rows)
        return Kept(rank, {name: now.spaces[name] for name in self._spaces if name in now.spaces}, values)

    def empty(self, rank: int) -> Kept:
        """What a step is made of, without rows."""
        none = torch.empty(0, dtype=torch.int64)
        layouts = {name: self._layouts[name] for name in self._spaces}
        spaces = {
            name: RowSpace.of_shards(name, layout, [none.view(len(ARRAYS), 0)] * layout.shards)
            for name, layout in layouts.items()
        }
        values = {
            name: KeptValue(self._graph.type_of(name), self._graph.space_of(name), self._layouts[name], none, None)
            for name in self._names
        }
        return Kept(rank, spaces, values)
