"""What goes over from the ranks that run ahead to those that train: where steps overlap, a checkpoint keeps it."""

from __future__ import annotations

from rlflow.controller.step_state import Keep
from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import Load, RunNode, TrainNode


class Crossing:
    """The values that cross, and the rows that they are of.

    Args:
        graph: Of the module.
        plan: Of all ranks.
        rank: This one.
        keep: Keeps rows and values of this rank.

    Attributes:
        tasks: What brings them over, of all ranks, in the global order.
        made_here: Whether this rank runs ahead.
        keeping: What is kept of them.
    """

    def __init__(self, graph: Graph, plan: Plan, rank: int, keep: Keep) -> None:
        self.tasks = plan.crossing()
        behind = {task.node_id for task in plan.every() if isinstance(task, RunNode | TrainNode) and task.lag}
        ahead = [task for task in plan.every() if isinstance(task, Load | RunNode) and not task.lag]
        self.made_here = bool(self.tasks) and any(rank in task.ranks for task in ahead)
        runs = [task.node_id for task in ahead if isinstance(task, RunNode)]
        read = {name for node in behind for name in graph.nodes[node].reads}
        spaces = [BATCH, *(name for name in runs if graph.nodes[name].makes_rows)]
        values = [name for name in (BATCH, *runs) if name in read]
        self.keeping = keep(spaces, values)
