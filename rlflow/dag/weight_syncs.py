"""When each policy's weights come to its engines, and when engines sleep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rlflow.dag.graph import Graph
from rlflow.dag.node import engine_of
from rlflow.dag.tasks import Fill, RunNode, Sleep, SyncWeights, Task, TrainNode, rank_ranges
from rlflow.errors import UserError
from rlflow.values.layout import Layout


def sync_of(policy: str, graph: Graph, layouts: Mapping[str, Layout]) -> SyncWeights:
    """What brings a policy's weights to its engines: from ranks that hold them, if steps change them, or from files."""
    source = layouts[policy].ranks if policy in graph.changed_roles() else ()
    return SyncWeights(policy, source, layouts[engine_of(policy)].ranks)


def with_syncs(
    tasks: Sequence[Task], graph: Graph, layouts: Mapping[str, Layout], shared: Mapping[str, str]
) -> Iterator[Task]:
    """The tasks, with each policy's weights brought to its engines before they generate, and what rests put to sleep.

    Engines of policies that no task needs together are awake one after another, where they share ranks. After the last
    task that generates they sleep if their ranks train, or hold other engines; before it, while their ranks train. What
    a train node has changed comes to the engines anew before they generate again.
    """
    every = {policy: sync_of(policy, graph, layouts) for policy in graph.policies()}
    training = {rank for node in graph.order if node.kind == "train" for rank in layouts[str(node.role)].ranks}
    awake: list[str] = []
    outdated: set[str] = set()
    changed: Counter[str] = Counter()
    last = max((place for place, task in enumerate(tasks) if _generates(task, graph)), default=-1)

    def sleep(policy: str) -> Sleep:
        awake.remove(policy)
        return Sleep(policy, every[policy].ranks)

    for place, task in enumerate(tasks):
        needed = _generates(task, graph)
        changes = graph.changed_by(graph.nodes[task.node_id]) if isinstance(task, TrainNode) else ()
        ranks = {rank for policy in needed for rank in every[policy].target} | {*(task.ranks if changes else ())}
        for policy in [other for other in awake if other not in needed and ranks.intersection(every[other].target)]:
            yield sleep(policy)
        in_turns = len({shared.get(policy, policy) for policy in needed}) < len(needed)
        if in_turns and isinstance(task, Fill):
            _refuse_turns_of_others(task, needed, every)
            task = replace(task, tasks=tuple(with_syncs(task.tasks, graph, layouts, shared)))
        else:
            for policy in needed:
                if policy in awake and policy not in outdated:
                    continue
                awake += [] if policy in awake else [policy]
                outdated.discard(policy)
                yield replace(every[policy], changed=changed[policy])
        yield task
        changed.update(changes)
        outdated.update(changes)
        if place == last:
            for policy in list(awake):
                several = any(other != policy for other in every)
                if several or training.intersection(every[policy].target):
                    yield sleep(policy)


def _refuse_turns_of_others(repeated: Fill, policies: Sequence[str], syncs: Mapping[str, SyncWeights]) -> None:
    """Weights change within what is repeated, so all ranks that send them must repeat it."""
    for policy in policies:
        if not set(syncs[policy].ranks) <= set(repeated.ranks):
            raise UserError(
                f"`engines` lets policies share an engine in turns, and a filter or partial rollout repeats the nodes"
                f" that generate on {rank_ranges(repeated.ranks)}, where the model of `{policy}` does not live; give"
                " each policy an engine of its own, or place models and engines on the same ranks"
            )


def _generates(task: Task, graph: Graph) -> tuple[str, ...]:
    """The policies that a task generates with, or that what it repeats does."""
    if isinstance(task, Fill):
        return tuple(dict.fromkeys(policy for each in task.tasks for policy in _generates(each, graph)))
    return graph.nodes[task.node_id].generates if isinstance(task, RunNode) else ()
