"""The problems of a graph, in words."""

from __future__ import annotations

import pytest

from rlflow.dag.graph import Graph, GraphError
from tests.dag.modules import ROLES


def problems(module: object, roles: tuple[str, ...] = ROLES) -> list[str]:
    """The problems of the module's graph, without the places."""
    with pytest.raises(GraphError) as error:
        Graph.read(module, roles)
    return [problem.message for problem in error.value.problems]
