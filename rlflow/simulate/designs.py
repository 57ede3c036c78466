"""Simulates a step in rlflow and in three other designs: the same nodes on the same GPUs, with other data paths.

- `rlflow`: by the plan. Exchanges go straight between ranks, packed, while nodes that do not read them run.
- `padded`, `packed`: one controller. It collects what a role makes, sends out what a role reads, one value at a time,
  and runs the nodes without a role. Rows are padded to the longest that the config allows, or packed.
- `store`: values are put into the memory of the machines that made them, and fetched by the ranks that read them; a
  metadata controller gets a message for each row that is put, and a request for each that is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rlflow.dag.node import Node
from rlflow.dag.tasks import DynamicSampling, Exchange, Load, RunNode, SyncWeights, Task, TrainNode, rank_ranges
from rlflow.memory.estimate import ranks_alike
from rlflow.memory.workload import Workload
from rlflow.simulate.costs import (
    all_to_all_seconds,
    decode_seconds,
    gather_seconds,
    score_seconds,
    straggling,
    sync_seconds,
    train_seconds,
)
from rlflow.simulate.hardware import Hardware
from rlflow.values.layout import Layout

Design = Literal["rlflow", "padded", "packed", "store"]
DESIGNS: tuple[Design, ...] = get_args(Design)
MEANING = {
    "rlflow": "rlflow",
    "padded": "one controller, padded",
    "packed": "one controller, packed",
    "store": "metadata controller, store",
}

CONTROLLER = "controller"
FILTER_DRAWS = 2  # batches that a filter draws until a step is full; an assumption
VARIATION = 0.5  # of responses' lengths, standard deviation over mean; an assumption
METADATA_BYTES = 40  # of a row: id, group, length, tokens and version, which every rank learns


def works(workload: Workload, hardware: Hardware, design: Design) -> list[WorkItem]:
    """All work of a step with its seconds, in the order of issue; `scheduled` adds when each begins.

    Args:
        workload: The rows, models and plan of the step.
        hardware: Hardware of a machine.
        design: Way in which values move between nodes; `rlflow` moves them as its plan says.
    """
    return list(_Step(workload, hardware, design).works())


def node_seconds(works: Iterable[WorkItem]) -> dict[str, float]:
    """Seconds in a step of each node by its id, and of all weight syncs as `sync`, as in the metrics `time/...`."""
    found = dict[str, float]()
    for work in works:
        if work.kind not in ("exchange", "control"):
            name, *_ = work.name.split()  # without a sync's policy and the number of a draw
            found[name] = found.get(name, 0.0) + work.seconds
    return found


class _Step:
    """Turns the tasks of a plan into work, and remembers after which work each value can be read."""

    def __init__(self, workload: Workload, hardware: Hardware, design: Design) -> None:
        self.workload = workload
        self.machine = hardware
        # Ranks that work at different times do not share what they compute on; steps that overlap have all at work.
        self.hardware = hardware.computing_on(workload.ranks)
        self.design = design
        alike = ranks_alike(workload.ranks, [task.ranks for task in workload.plan.every()])
        # the lane of each rank, such as `ranks 0-3`; ranks that take part in the same tasks share one
        self.lanes = {rank: rank_ranges(ranks) if len(alike) > 1 else "ranks" for ranks in alike for rank in ranks}
        # By value: the work after which it is there, where it is made; what is not in it is there from the beginning.
        self.made: dict[str, str] = {}
        self.brought: dict[tuple[str, str], str] = {}  # by value and the node that reads it: the work that brings it
        self.draw = ""
        self.syncs: Counter[str] = Counter()  # by policy, which may be synced again for an engine that it shares

    def works(self) -> Iterator[WorkItem]:
        for task in self._in_order():
            if isinstance(task, DynamicSampling):
                for draw in range(1 if task.filter_id is None else FILTER_DRAWS):
                    self.draw = f" ({draw + 1})" if draw else ""
                    for repeated in task.tasks:
                        yield from self._task(repeated)
                self.draw = ""
            else:
                yield from self._task(task)

    def _in_order(self) -> list[Task]:
        """The plan's tasks; where steps overlap, syncs, then tasks with a lag, on rows of an earlier step."""
        tasks = list(self.workload.plan.tasks)
        if not self.workload.plan.max_staleness:
            return tasks
        return sorted(tasks, key=lambda task: 0 if isinstance(task, SyncWeights) else 1 if task.lag else 2)

    def _task(self, task: Task) -> Iterator[WorkItem]:
        if not self.workload.plan.max_staleness:
            self.hardware = self.machine.computing_on(len(task.ranks))
        if isinstance(task, Load):  # the batch is read ahead, while the step before is trained
            if self.hardware.step_seconds:
                yield WorkItem(f"loading{self.draw}", "host", self._of(task.ranks), self.hardware.step_seconds)
        elif isinstance(task, SyncWeights):
            role = self.workload.roles[task.policy]
            elsewhere = {*task.target} - {*task.source}
            seconds = sync_seconds(role, self.hardware, crossing=len(elsewhere) + 1 if elsewhere else 0)
            nbytes = float(role.size.parameters * role.width)
            self.syncs[task.policy] += 1
            again = f" ({times})" if (times := self.syncs[task.policy]) > 1 else ""
            yield WorkItem(f"sync {task.policy}{again}", "sync", self._of(task.ranks), seconds, nbytes=nbytes)
        elif isinstance(task, Exchange) and self.design == "rlflow":
            yield from self._exchange(task)
        elif isinstance(task, RunNode | TrainNode):
            yield from self._node(self.workload.graph.nodes[task.node_id], task.layout)

    def _node(self, node: Node, layout: Layout) -> Iterator[WorkItem]:
        on_hub = self.design in ("padded", "packed") and not node.models
        through_others = self.design != "rlflow" and not on_hub
        if through_others:
            for value in node.reads:
                yield from self._fetched(value, node, layout)
        needs = tuple(self.brought.get((value, node.id), self.made.get(value, "")) for value in node.reads)
        kind, seconds = self._seconds(node, layout)
        if on_hub:
            seconds = self.workload.rows(node.space) * self.hardware.row_seconds
        lanes = (CONTROLLER,) if on_hub else self._of(layout.ranks)
        name = self.made[node.id] = node.id + self.draw
        yield WorkItem(name, kind, lanes, seconds, needs)
        if through_others and self.workload.graph.readers(node.id):
            yield from self._stored(node, layout)

    def _seconds(self, node: Node, layout: Layout) -> tuple[str, float]:
        load, dealt = self.workload, self.workload.rows(node.space)
        # where there is less to deal than shards, some have no rows; samples of a prompt may be dealt together
        shards = min(layout.shards, load.prompts if layout.shard_by == "groups" else dealt)
        rows, tokens, length = dealt / shards, load.computed_tokens(node, shards), load.lengths.total
        if node.kind == "rollout":
            return "rollout", self._generate(node, rows, shards)
        if node.role is None:
            return "host", rows * self.hardware.row_seconds
        role = load.roles[node.role]
        if not load.moves_rows:
            tokens *= straggling(rows, shards, VARIATION * load.lengths.response / length)
        if node.kind == "train":
            return "train", train_seconds(role, tokens * role.epochs, length, self.hardware)
        return "score", score_seconds(role, tokens, length, self.hardware)

    def _generate(self, node: Node, rows: float, shards: int) -> float:
        load, lengths, policy = self.workload, self.workload.lengths, node.generates[0]
        role, engine = load.roles[policy], load.engines[load.shared.get(policy, policy)]
        # each rank has a head of keys or more, so that more ranks than heads have copies
        role = replace(role, size=replace(role.size, kv_heads=max(role.size.kv_heads, engine.ranks)))
        row = lengths.total * role.size.cache_bytes(role.width) + role.size.state_bytes
        held = engine.cache(self.hardware.memory) * engine.ranks / row
        return decode_seconds(
            role,
            engine.ranks,
            self.hardware,
            responses=rows,
            prompts=rows * load.rows(node.inside) / load.rows(node.space),
            prompt=lengths.prompt,
            response=lengths.response * straggling(rows, shards, VARIATION),
            longest=lengths.longest_response,
            max_num_seqs=max(1.0, min(engine.memory.max_num_seqs or self.hardware.max_num_seqs, held)),
        )

    def _exchange(self, task: Exchange) -> Iterator[WorkItem]:
        """An exchange straight between ranks, after the rows' metadata, from which it is partitioned, is gathered."""
        load, rows = self.workload, self.workload.rows(self.workload.graph.space_of(task.value))
        moves = load.moves_rows or task.source.shards != task.target.shards
        nbytes = (
            rows * load.value_bytes(task.value, fields=task.columns) * (1 - 1 / task.target.shards) if moves else 0.0
        )
        ranks = len(task.ranks)
        seconds = all_to_all_seconds(nbytes / task.source.shards, ranks, self.hardware)
        seconds += gather_seconds(METADATA_BYTES * rows, ranks, self.hardware)
        readers = _readers(load, task)
        name = f"{task.value} -> {', '.join(readers)}{self.draw}"
        need = self.made.get(task.value, "")
        if self.hardware.exchange_row_seconds and nbytes:
            packing = (
                rows / task.source.shards * load.columns(task.value, task.columns) * self.hardware.exchange_row_seconds
            )
            yield WorkItem(f"pack {name}", "exchange", self._of(task.ranks), packing, (need,))
            need = f"pack {name}"
        self.brought |= {(task.value, reader): name for reader in readers}
        links = tuple(f"link of {lane}" for lane in self._of(task.ranks))
        yield WorkItem(name, "exchange", links, seconds, (need,), nbytes)

    def _bytes(self, value: str) -> float:
        rows = self.workload.rows(self.workload.graph.space_of(value))
        return rows * self.workload.value_bytes(value, padded=self.design == "padded")

    def _fetched(self, value: str, node: Node, layout: Layout) -> Iterator[WorkItem]:
        """The work that brings a value to a reader from a controller, or from a store."""
        nbytes, needs = self._bytes(value), (self.made.get(value, ""),)
        name = self.brought[value, node.id] = f"{value} -> {node.id}{self.draw}"
        if self.design == "store":
            yield self._asked(name, value, needs)
            nbytes *= layout.copies
            seconds = all_to_all_seconds(nbytes / len(layout.ranks), self.workload.ranks, self.hardware)
            yield WorkItem(name, "exchange", self._of(layout.ranks), seconds, (f"{name}, asked",), nbytes)
        else:
            yield WorkItem(name, "exchange", (CONTROLLER,), nbytes / self.hardware.hub_bandwidth, needs, nbytes)

    def _stored(self, node: Node, layout: Layout) -> Iterator[WorkItem]:
        """The work that brings a value from its maker to a controller, or into a store."""
        nbytes, needs, name = self._bytes(node.id), (self.made[node.id],), f"{node.id} ->{self.draw}"
        if self.design == "store":
            seconds = all_to_all_seconds(nbytes / layout.shards, self.workload.ranks, self.hardware)
            yield WorkItem(name, "exchange", self._of(layout.ranks), seconds, needs, nbytes)
            yield self._asked(name, node.id, (name,))
            self.made[node.id] = f"{name}, asked"
        else:
            yield WorkItem(name, "exchange", (CONTROLLER,), nbytes / self.hardware.hub_bandwidth, needs, nbytes)
            self.made[node.id] = name

    def _asked(self, name: str, value: str, needs: tuple[str, ...]) -> WorkItem:
        rows = self.workload.rows(self.workload.graph.space_of(value))
        return WorkItem(f"{name}, asked", "control", (CONTROLLER,), rows * self.hardware.control_seconds, needs)

    def _of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.lanes[rank] for rank in ranks))


def _readers(workload: Workload, task: Exchange) -> list[str]:
    """The nodes that read the value in the exchange's layout."""
    layouts = workload.plan.layouts()
    readers = workload.graph.readers(task.value)
    return [node.id for node in readers if layouts[node.id] == task.target and node.inside == task.reader_space]


@dataclass(frozen=True)
class WorkItem:
    """One piece of a step's work: a node, a weight sync or a transfer, with when it begins and how long it takes.

    Attributes:
        name: Unique in the step, such as `rewards` or `rollout -> actor_loss`.
        kind: `rollout`, `score`, `train`, `host`, `sync`, `exchange` or `control`.
        lanes: Lanes that it occupies, one piece of work at a time: `ranks 0-3`, `link of ranks 0-3`, `controller`.
        seconds: Duration.
        needs: Names of the works that must have ended before; an empty name is none.
        nbytes: Bytes that it moves, on all ranks together.
        start: Time when it begins, set by `scheduled`, in seconds after the step's start.
        after: Name of the work that it waited for last; None if it waited for none.
    """

    name: str
    kind: str
    lanes: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()
    nbytes: float = 0.0
    start: float = 0.0
    after: str | None = None

    @property
    def end(self) -> float:
        """End of the work, in seconds after the step's start."""
        return self.start + self.seconds


@dataclass(frozen=True)
class StepTimeline:
    """All work of a step, each with its start.

    Attributes:
        works: The works by name, in the order in which they were issued.
    """

    works: dict[str, WorkItem]

    @property
    def seconds(self) -> float:
        """Seconds of the step, until the last work ends."""
        return max((work.end for work in self.works.values()), default=0.0)

    def critical_path(self) -> list[WorkItem]:
        """The works that determine the step's seconds, in order: each began when the one before it ended."""
        path: list[WorkItem] = []
        work = max(self.works.values(), key=lambda work: work.end, default=None)
        while work is not None:
            path.append(work)
            work = None if work.after is None else self.works[work.after]
        return path[::-1]


def scheduled(works: Iterable[WorkItem]) -> StepTimeline:
    """Give each work its start: one after the other on each lane, in the order given, after the works that it needs.

    For example `rollout` takes 3 s on the ranks, its exchange 5 s on their links, `rewards` 1 s on the ranks, and
    `actor_loss`, which needs the exchange, 2 s. They begin after 0, 3, 3 and 8 s: rewards are computed while the
    exchange is in progress, and the step takes 10 s. Its critical path is rollout, exchange and `actor_loss`.

    Args:
        works: The works in the order of issue; each needs only works before it.
    """
    found, last = dict[str, WorkItem](), dict[str, str]()
    for work in works:
        assert work.name not in found, work.name
        before = {*work.needs, *(last.get(lane, "") for lane in work.lanes)} - {""}
        latest = max(before, key=lambda name: found[name].end, default=None)
        found[work.name] = replace(work, start=0.0 if latest is None else found[latest].end, after=latest)
        last |= dict.fromkeys(work.lanes, work.name)
    return StepTimeline(found)
