"""`Nodes` runs a node on one rank: it gets the values that the node reads, calls the method, and stores the result."""

from __future__ import annotations

import dataclasses
import json
from math import isnan
from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.context.generation import GenerationHistory
from rlflow.context.node_context import Running
from rlflow.controller.inputs import NodeInputs
from rlflow.controller.policies import Policies
from rlflow.controller.prompt_sampler import PromptSampler
from rlflow.controller.run import Run
from rlflow.controller.step import Step
from rlflow.controller.training import Training
from rlflow.dag.annotations import type_name
from rlflow.dag.node import Node
from rlflow.dag.tasks import DeferUnfinished, RunNode, TrainNode
from rlflow.databuffer.rows import RowSpace, ancestors
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError, within_node
from rlflow.metrics import StepMetrics
from rlflow.models.causal_lm import CausalLM
from rlflow.module import handles
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import columns, take_rows
from rlflow.values.each import After, Each
from rlflow.values.host_copy import bring_over, on_device, on_host
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath, lexicographic
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout


class Nodes:
    """Runs the nodes of one rank; the controller calls it for the tasks `RunNode`, `TrainNode` and `DeferUnfinished`.

    For `rewards(self, rollout: WithTexts) -> PerSample`, `run` takes this rank's rows of `rollout` from the step's
    buffer, calls `module.rewards(rollout=...)`, refuses a NaN in the result `[B]`, and stores it as `rewards`.

    Args:
        run: The run on this rank.
        policies: Policies that generate, with the versions of their weights.
        callbacks: Called before and after each node that is not trained.
        sampler: Sampler of prompts.
        inputs: Stores the inputs of nodes, in steps of `trainer.dump_steps` and whenever a node raises.

    Attributes:
        training: Makes the updates of train nodes.
    """

    def __init__(
        self,
        run: Run,
        policies: Policies,
        callbacks: Callbacks,
        sampler: PromptSampler,
        inputs: NodeInputs,
    ) -> None:
        self._run = run
        self._policies = policies
        self._context = run.context
        self._transport = run.transport
        self._callbacks = callbacks
        self._sampler = sampler
        self._inputs = inputs
        repeated = () if run.plan.dynamic_sampling is None else run.plan.dynamic_sampling.tasks
        self._repeated = {task.node_id for task in repeated if isinstance(task, RunNode)}
        self.training = Training(run, policies.before_update)

    def run(self, task: RunNode, step: Step) -> None:
        """Call a node on this rank's rows, and put its value into the step's buffer; called by all ranks of the task.

        Raises:
            UserError: A number of a sample is infinite or NaN, which all these ranks raise. Or, on this rank, the
                result does not fit the node's annotation or the rows that the node saw.
        """
        node, layout = self._run.graph.nodes[task.node_id], task.layout
        self._callbacks.call(Callback.on_node_start, node.id)
        values, space, dropped = self._read(node, layout, step)
        with self._inputs.around(node, layout, step):
            result, calls = self._call(node, space, layout, values, dropped, step)
            if node.makes_rows:
                if node.generates:
                    self._require_temperature(node, result, calls)
                    result = calls.returned(result, space.path.shape[1])
                rows = new_rows(node, result, space, layout, self._transport.rank, calls)
                space = step.gather(node.id, layout, *rows)
                if node.generates and not self._sampler.cuts_off and layout.is_leader(self._transport.rank):
                    measure(node.id, result, step.metrics, calls.tokens)
                if node.id not in self._repeated:
                    self.note_age(task, step)
            elif node.role is not None:
                self._policies.scored(node.role)
            step.buffer.put(node.id, result, node.returns, space, layout)
            if node.kind == "compute" or node.kind == "filter":
                require_finite(node, result, space, layout, self._transport)
            self._inputs.write_result(node, layout, step)
        step.buffer.free(*task.frees)
        self._callbacks.call(Callback.on_node_end, node.id)

    def train(self, task: TrainNode, step: Step) -> None:
        """Train a role on this rank's rows, if its `start_step` has come; called by all ranks of the task."""
        node = self._run.graph.nodes[task.node_id]
        values, space, dropped = self._read(node, task.layout, step)
        if self.training.begun(node, step.number):
            running = Running(node, space, task.layout, step.draw, {}, step.metrics, dropped=dropped)
            with (
                self._context.within(running),
                self._inputs.around(node, task.layout, step),
                within_node(node.id, node.place, self._transport.rank),
            ):
                self.training.run(node, values, step, task.layout, dropped)
        step.buffer.free(*task.frees)

    def defer_unfinished(self, task: DeferUnfinished, step: Step) -> None:
        """Keep the groups whose responses have all ended in the step, log their lengths, and hold back the others."""
        self._sampler.defer_unfinished(task, step)
        layout = self._run.value_layouts[task.node_id]
        if layout.is_leader(self._transport.rank):
            measure(task.node_id, step.buffer.get(task.node_id, layout), step.metrics, continued=True)
        step.buffer.free(*task.frees)

    def note_age(self, run: RunNode, step: Step) -> None:
        """Log `<node>/staleness`: how many versions behind the weights were with which the responses began."""
        node, staleness = self._run.graph.nodes[run.node_id], self._run.plan.max_staleness
        if (
            not node.generates
            or not (staleness or self._sampler.repeats)
            or self._transport.rank != run.layout.ranks[0]
        ):
            return
        versions = step.spaces[node.id].versions
        newest = self._policies.versions_of(step.number + staleness, self._run.graph.changed_before(node))
        trained = {newest[name] for name in node.generates if self._policies[name].changes_per_step}
        if len(trained) > 1:
            return  # which of them generated a row is not known
        ages = max(trained, default=0) - versions
        step.metrics.mean(f"{node.id}/staleness", ages.sum(), float(len(versions)))

    def _call(
        self, node: Node, space: RowSpace, layout: Layout, values: dict[str, Any], dropped: Tensor | None, step: Step
    ) -> tuple[Any, GenerationHistory]:
        """Call the module's method; returns its result, and the calls of `generate` that it made."""
        versions = self._policies.versions_of(step.number, self._run.graph.changed_before(node))
        part = self._sampler.part_of(node.id)
        running = Running(node, space, layout, step.draw, versions, step.metrics, part, dropped=dropped)
        with self._context.within(running), within_node(node.id, node.place, self._transport.rank):
            result = getattr(self._run.module, node.id)(**values, **dict.fromkeys(node.after, After()))
        if node.makes_rows and not isinstance(result, node.returns):
            raise UserError(
                f"node `{node.id}` returned {type(result).__name__} and is annotated {type_name(node.returns)}"
                f" ({node.place}); return that"
            )
        if part is not None:
            step.cut_off = running.cut_off
            if step.cut_off is not None and len(step.cut_off) != len(result.lengths):
                raise UserError(
                    f"`trainer.partial_rollout` continues the rows of `generate`, and node `{node.id}` returned other"
                    f" rows ({node.place}); return all of `generate`, and choose among them in another node"
                )
        return result, running.calls

    def _require_temperature(self, node: Node, rows: Rollout, calls: GenerationHistory) -> None:
        """Refuse rows of a policy that is trained on them, and cannot score them at the temperatures of its calls."""
        asked = set[float]().union(*calls.temperatures.values()) - {0.0}
        if not asked:
            return
        graph = self._run.graph
        readers = (other for other in graph.order if other.kind == "train")
        trained = {str(other.role) for other in readers if node.id in map(graph.space_of, other.reads)}
        for role in trained:
            handle, sampled = handles(self._run.module)[role], calls.temperatures.get(role, set())
            if not isinstance(handle, CausalLM):
                continue
            if not (any(map(isnan, asked)) if handle.reads_temperature else sampled):
                continue  # and wait for no copy of the rows' temperatures
            here = {*on_host(rows.temperature).tolist()}
            if any(map(isnan, here)):
                raise UserError(
                    f"node `{node.id}` continues responses at another temperature than they were begun at"
                    f" ({node.place}), and `{role}`, which is trained on them, scores a response at one; give both"
                    " calls the same"
                )
            others = sampled & here - {0.0, handle.temperature}
            if others and not handle.reads_temperature:
                raise UserError(
                    f"node `{node.id}` generates at the temperature {max(others):g} ({node.place}), and `{role}`, which"
                    f" is trained on these rows, scores them at `{role}.temperature`, {handle.temperature:g}; set that"
                    " temperature, and leave it out of the call"
                )

    def _read(self, node: Node, layout: Layout, step: Step) -> tuple[dict[str, Any], RowSpace, Tensor | None]:
        """The values that `node` reads on this rank, by parameter; its row space; and which rows a reward dropped.

        The last is `[B]` bool on the CPU, for this rank's rows; None if none were dropped. The values have the dropped
        rows masked.
        """
        graph, rank, space = self._run.graph, self._transport.rank, step.spaces[node.inside]
        here = space.held(layout, rank)
        out = step.left_out(space, node)
        dropped = None if out is None else out[here]
        values: dict[str, Any] = {}
        for name in node.reads:
            made = step.buffer.get(name, layout, step.spaces[graph.seen_in(node, name)])
            value = values[name] = graph.fields[node.id, name].seen(made)
            if name in node.each:
                below = step.spaces[graph.space_of(name)]
                counts = space.counts_below(here, below)
                each: Each[Any] = Each(value, on_device(counts, self._transport.device))
                if (out := step.left_out(below, node)) is not None:
                    each = each_without(each, graph.type_of(name), out[space.below(below, layout, rank)])
                values[name] = each
            elif dropped is not None:
                values[name] = without_dropped(value, dropped)
        return values, space, dropped


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
    """A copy of `each` without the rows for which `dropped`, `[K]` bool on the CPU, is True; `counts` shrink too."""
    kept = ~dropped
    parent, counts = on_host(each.parent)[kept], on_host(each.counts)
    counts = torch.zeros_like(counts).index_add(0, parent, torch.ones_like(parent))
    return Each(take_rows(each.values, annotation, kept.nonzero()[:, 0]), on_device(counts, each.counts.device))


def new_rows(
    node: Node, value: Any, above: RowSpace, layout: Layout, rank: int, calls: GenerationHistory
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Paths, lengths, versions and episodes of the rows that a node made on this rank, for the row space on all ranks.

    A node that saw the prompts 4 and 7 returned the responses 4 0, 4 2 and 7 1, of 3, 2 and 7 tokens to prompts of 2:

        path [[4, 0], [4, 1], [7, 0]], lengths [3, 2, 7], tokens [5, 4, 9], versions [12, 12, 12], begins [1, 1, 1]

    Args:
        node: The node that made the rows.
        value: Value that the node returned.
        above: The rows that the node saw.
        layout: Layout of the node.
        rank: Rank of this process.
        calls: The calls of `generate` that the node has made.

    Returns:
        Five tensors on the CPU: the paths of the rows `[B, depth]`, whose last number is the row's number among its
        siblings; and `[B]` each, the response tokens, the tokens that a model reads, the version of the policy that
        generated the row, -1 where none did, and 1 where the row begins an episode, else 0.

    Raises:
        UserError: The value has no paths, or a row has no parent that the node saw on this rank.
    """
    names = [column.name for column in columns(node.returns) if column.kind is ColumnKind.PATH]
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
    begins = _begins(node, value, own, numbers, above, calls) if isinstance(value, Rollout) else torch.ones_like(none)
    return own, lengths, tokens, on_cpu.get("versions", none), begins


def _begins(node: Node, value: Rollout, own: Tensor, made: Tensor, above: RowSpace, calls: GenerationHistory) -> Tensor:
    """`[B]` int64, 1 where a row begins an episode; 0 where the row before it, by path, is of the same episode.

    Rows that continue one row are of its episode, as the leaves of a tree. Else `branch` numbers an episode's rows.

    Args:
        node: The node that made the rows.
        value: The rows.
        own: `[B, depth + 1]`, their paths.
        made: `[B, any]`, their paths as the node returned them.
        above: The rows that the node saw.
        calls: The calls of `generate` that the node has made.
    """
    begins, before = torch.ones(len(own), dtype=torch.int64), None
    branch, parent = on_host(value.branch), above.episodes[ancestors(above.path, own)]
    continues = (on_host(value.inherited) > 0) & (branch == 0) & bool(node.generates)
    continued = {*parent[continues].tolist()}  # episodes of the rows above
    for row in lexicographic(own).tolist() if continued or made.shape[1] > own.shape[1] or branch.any() else ():
        path, number, of = tuple(made[row].tolist()), int(branch[row]), int(parent[row])
        root = calls.root_of(path)
        episode = (of,) if of in continued else (*root[:-1], root[-1] - number)
        if of in continued or number > 0 or root != path:
            begins[row] = int(episode != before)
        before = episode
    return begins


def _counts(value: Any) -> dict[str, Tensor]:
    """The columns `[B]` of a value from which `new_rows` computes, by name, on their own device."""
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
    if isinstance(value, Rollout):
        found |= {"branch": value.branch, "inherited": value.inherited}  # for `_begins`
    return found


def _require_parents(node: Node, above: RowSpace, held: Tensor, parents: Tensor, rank: int) -> None:
    """Refuse rows whose parents' paths `[B, depth]` are not those of rows at the positions `held`."""
    position = ancestors(above.path, parents)
    orphans = ~torch.isin(position, held)
    if bool(orphans.any()):
        row = int(orphans.nonzero()[0])
        raise UserError(
            f"row {row} that node `{node.id}` returned on rank {rank} has the parent"
            f" {'.'.join(map(str, parents[row].tolist()))}, which is not a row of `{node.inside}` that it reads there"
            f" ({node.place}); return rows that were made from those it reads"
        )


def require_finite(node: Node, value: Any, space: RowSpace, layout: Layout, transport: Transport) -> None:
    """Refuse infinite and NaN numbers in a value of one number per sample; a collective of the node's ranks.

    It is called for nodes without a role, such as rewards and advantages per sample; values per token are not checked.

    Args:
        node: The node that made the value.
        value: Value that the node returned.
        space: Row space of the value.
        layout: Layout of the node.
        transport: Transport to the other ranks.

    Raises:
        UserError: A rank has such a number. All ranks raise the error, which names the first such sample by its path.
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
        found += [(space.path[held[row]].tolist(), name) for row in rows]
    ranks = transport.gather_bytes(json.dumps(found).encode() if found else b"", layout.ranks)
    of_all = [each for rank in ranks if rank for each in json.loads(rank)]
    if of_all:
        (root, *below), name = min(of_all)
        what = f"part `{name}` of `{node.id}`" if name else f"`{node.id}`"
        row = f"sample {'.'.join(map(str, below))} of prompt {root}" if below else f"row {root}"
        raise UserError(
            f"{what} is infinite or NaN for {row} of the run ({node.place}); correct what made it, or mask the row"
        )


def _numbers(value: Any, annotation: Any) -> dict[str, Tensor] | None:
    """The floating point columns `[B]` or `[B, ...]` of a value, by column or part; None if its type has none."""
    found: dict[str, Tensor] = {}
    numeric = [column for column in columns(annotation) if column.kind in (ColumnKind.SAMPLE, ColumnKind.PARTS)]
    for column in numeric:
        data = getattr(value, column.name) if column.name else value
        parts = data if isinstance(data, dict) else {column.name: data}
        found |= {name: x for name, x in parts.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return found if numeric else None


def measure(
    node_id: str, rollout: Rollout, metrics: StepMetrics, sampled: int | None = None, continued: bool = False
) -> None:
    """Log this rank's `<node>/length` and `<node>/truncated`, means, and `<node>/responses` and `<node>/tokens`, sums.

    Args:
        node_id: Name of the node.
        rollout: This rank's responses; with `trainer.partial_rollout` those that have ended.
        metrics: Metrics of the step.
        sampled: Number of tokens that were sampled for the responses; None for the number of their tokens.
        continued: Whether to log `<node>/continued` too, the share of responses with tokens of newer weights.
    """
    rows, tokens = float(len(rollout.lengths)), on_host(rollout.policy_lengths).sum()
    metrics.mean(f"{node_id}/length", tokens, rows)
    metrics.mean(f"{node_id}/truncated", (~rollout.finished).sum(), rows)
    metrics.sum(f"{node_id}/responses", rows)
    metrics.sum(f"{node_id}/tokens", float(tokens if sampled is None else sampled))
    if continued:
        places = torch.arange(rollout.versions.shape[1], device=rollout.versions.device)
        newer = (rollout.versions > rollout.version[:, None]) & (places < rollout.lengths[:, None])
        metrics.mean(f"{node_id}/continued", newer.any(dim=1).sum(), rows)
