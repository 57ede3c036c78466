"""The number of updates of a role in a run, for learning-rate schedules that end with the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlflow.dag.graph import Graph
from rlflow.dag.node import BATCH, Node
from rlflow.errors import UserError, setting
from rlflow.harness.harness import Harness
from rlflow.module import RLModule, aggregation_of, environments, handles

if TYPE_CHECKING:
    from rlflow.controller.run import Run


def updates_per_step(module: RLModule, graph: Graph, role: str, prompts: int) -> int | None:
    """Optimizer updates of a trained role in one step of the run; None if its rows cannot be counted beforehand.

    Args:
        module: The algorithm.
        graph: Graph of the algorithm.
        role: The trained role.
        prompts: Number of prompts in a step.
    """
    handle, found = handles(module)[role], 0
    for node in _training(graph, role):
        rows = _rows(module, graph, node, prompts, module.group_size)
        if handle.samples_per_update is None:
            found += handle.epochs
        elif rows is None:
            return None
        else:
            found += handle.epochs * math.ceil(rows / handle.samples_per_update)
    return found


def counted(module: RLModule, graph: Graph, role: str, prompts: int, steps: int) -> int | None:
    """The length of a role's learning-rate schedule in a run of `steps` steps, in updates or in steps.

    Steps before `start_step` are not counted.

    Returns:
        The length; None if the schedule counts updates, and their number is not known.
    """
    handle = handles(module)[role]
    trained = max(0, steps - handle.start_step)
    if handle.optimizer is not None and handle.optimizer.interval == "steps":
        return trained
    updates = updates_per_step(module, graph, role, prompts)
    return None if updates is None else trained * updates


def check_schedules(module: RLModule, graph: Graph, prompts: int) -> None:
    """Refuse a schedule that ends with the last update, if the number of updates is not known.

    Raises:
        UserError: A role has such a schedule.
    """
    for role in graph.trained_roles():
        handle = handles(module)[role]
        if not _ends_by_updates(module, role) or updates_per_step(module, graph, role, prompts) is not None:
            continue
        node = next(node for node in _training(graph, role) if _rows(module, graph, node, prompts, 1) is None)
        optimizer = handle.optimizer
        assert optimizer is not None
        raise UserError(
            f"{setting(optimizer, 'schedule', f'{role}.optimizer.schedule')} is {optimizer.schedule!r} and ends with"
            f" the last update, and `{node.id}` trains on rows of `{node.inside}`, whose number only the run knows; set"
            f" {setting(optimizer, 'interval', f'{role}.optimizer.interval')} to 'steps', or"
            f" {setting(handle, 'samples_per_update', f'{role}.samples_per_update')} to null"
        )


def check_made(run: Run, tried: Mapping[str, int], step: int) -> None:
    """Refuse a run whose updates differ from a role's schedule: the rate would become 0 too early, or never.

    Args:
        run: The run on this rank.
        tried: Number of updates in this step, skipped ones included, by role that this rank trained.
        step: Number of the step, from 1.

    Raises:
        UserError: A role made another number of updates.
    """
    module, graph, prompts = run.module, run.graph, run.data.prompts_per_step
    for role, updates in tried.items():
        expected = updates_per_step(module, graph, role, prompts) if _ends_by_updates(module, role) else None
        if expected is None or updates == expected:
            continue
        optimizer = handles(module)[role].optimizer
        raise UserError(
            f"`{role}` would make {updates} updates in step {step}, and"
            f" {setting(optimizer, 'schedule', f'{role}.optimizer.schedule')} counts {expected} in each step, from"
            f" `data.prompts_per_step` {prompts} and `module.group_size` {module.group_size}; set"
            f" {setting(optimizer, 'interval', f'{role}.optimizer.interval')} to 'steps', or the group size"
            " to the number sampled"
        )


def _ends_by_updates(module: RLModule, role: str) -> bool:
    optimizer = handles(module)[role].optimizer
    return optimizer is not None and optimizer.schedule != "constant" and optimizer.interval == "updates"


def _training(graph: Graph, role: str) -> list[Node]:
    return [node for node in graph.order if (node.kind, node.role) == ("train", role)]


def _rows(module: RLModule, graph: Graph, node: Node, prompts: int, group_size: int) -> int | None:
    """Rows that a train node sees in a step; None unless they are prompts, or samples of the only node that generates.

    If several nodes generate, each of them may sample another number of responses than `group_size`. An agent that owns
    its loop decides how many rows an episode has; by `episode-mean` episodes count in place of rows.
    """
    if node.inside == BATCH:
        return prompts
    if aggregation_of(module, handles(module)[str(node.role)]) != "episode-mean" and any(
        isinstance(environment, Harness) for environment in environments(module).values()
    ):
        return None
    generating = [other.id for other in graph.order if other.generates]
    made_by = graph.nodes[node.inside]
    return prompts * group_size if generating == [made_by.id] and made_by.inside == BATCH else None
