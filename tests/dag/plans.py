"""Layouts of two ranks, and plans on them."""

from __future__ import annotations

from rlflow.dag.graph import Graph
from rlflow.dag.planner import Plan, plan
from rlflow.values.layout import Layout
from tests.dag.modules import ROLES

BOTH = (0, 1)
GROUPS = Layout(BOTH, 2)
BALANCED = Layout(BOTH, 2, "balanced", 64)


def two_ranks(module: object, rollout: Layout = GROUPS) -> Plan:
    """The plan of a module on two ranks, training and scoring balanced."""
    layouts = {"actor.rollout": rollout, "actor": BALANCED, "reference": BALANCED}
    return plan(Graph.read(module, ROLES), layouts, world_size=2)
