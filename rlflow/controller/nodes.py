"""How nodes run: what they read, the call, the rows that they make, and what becomes of the result."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.calls import Calls
from rlflow.controller.context import Running
from rlflow.controller.draws import Draws
from rlflow.controller.failures import each_without, left_out, without_dropped
from rlflow.controller.finite import require_finite
from rlflow.controller.in_step import InStep
from rlflow.controller.inputs import NodeCall, NodeInputs
from rlflow.controller.new_rows import new_rows
from rlflow.controller.policies import Policies
from rlflow.controller.responses import measure
from rlflow.controller.run import Run
from rlflow.controller.steps import Steps
from rlflow.controller.training import Training
from rlflow.dag.node import Node
from rlflow.dag.tasks import HoldBack, RunNode, TrainNode
from rlflow.databuffer.rows import RowSpace
from rlflow.errors import UserError, within_node
from rlflow.values.each import Each, Trained
from rlflow.values.host_copy import on_device
from rlflow.values.layout import Layout
from rlflow.values.rollout import Rollout


class Nodes:
    """Runs the nodes of one rank.

    Args:
        run: The run on this rank.
        policies: Policies that generate.
        callbacks: Called before and after each node.
        steps: Steps in progress.
        draws: Draws of prompts.
        inputs: Stores what nodes read in some steps.

    Attributes:
        training: Makes the updates of train nodes.
    """

    def __init__(
        self,
        run: Run,
        policies: Policies,
        callbacks: Callbacks,
        steps: Steps,
        draws: Draws,
        inputs: NodeInputs,
    ) -> None:
        self._run = run
        self._policies = policies
        self._context = run.context
        self._transport = run.transport
        self._callbacks = callbacks
        self._steps = steps
        self._draws = draws
        self._inputs = inputs
        repeated = () if run.plan.fill is None else run.plan.fill.tasks
        self._repeated = {task.node_id for task in repeated if isinstance(task, RunNode)}
        trained = [task for task in run.plan.every() if isinstance(task, TrainNode)]
        self.training = Training(
            run.module,
            run.graph,
            run.strategy,
            run.transport,
            run.settings.seed,
            before_update=policies.before_update,
            bad_updates=run.bad_updates,
            gives_up=all(len(task.ranks) == run.transport.world_size for task in trained),
        )

    def run(self, task: RunNode, now: InStep) -> None:
        """Call a node on this rank's rows, and keep what it makes."""
        node, layout = self._run.graph.nodes[task.node_id], task.layout
        self._callbacks.call(Callback.on_node_start, node.id)
        values, read = self._read(node, layout, now)
        with self._kept(node, layout, now) as kept:
            result, calls = self._call(node, read, layout, values, now)
            space = read
            if node.makes_rows:
                if node.generates:
                    result = self._returned(node, result, calls, read)
                space = self._made(node, layout, now, result, read, calls)
                if node.id not in self._repeated:
                    self.note_age(task, now)
            elif node.role is not None:
                self._policies.scored(node.role)
            now.buffer.put(node.id, result, node.returns, space, layout)
            if node.kind == "compute" or node.kind == "filter":
                require_finite(node, result, space, layout, self._transport)
            kept.made(now.buffer.get(node.id, layout), space)
        self._steps.free(task.frees, now)
        self._callbacks.call(Callback.on_node_end, node.id)

    def train(self, task: TrainNode, now: InStep) -> None:
        """Train a role with this rank's rows, from the first step that does."""
        node = self._run.graph.nodes[task.node_id]
        values, space = self._read(node, task.layout, now)
        if self.training.begun(node, now.step):
            dropped = self._dropped(node, task.layout, now)
            self._context.running = Running(node, space, task.layout, now.draw, {}, now.metrics, dropped=dropped)
            with self._kept(node, task.layout, now), within_node(node.id, node.place, self._transport.rank):
                self.training.run(node, values, space, task.layout, now.metrics, dropped)
            self._context.running = None
        self._steps.free(task.frees, now)

    def hold_back(self, task: HoldBack, now: InStep) -> None:
        """Leave the step the groups whose responses have all ended."""
        partial, layout = self._draws.partial, self._run.value_layouts[task.node_id]
        assert partial is not None
        partial.hold_back(now, self._context.under_way)
        if layout.publishes(self._transport.rank):
            measure(task.node_id, now.buffer.get(task.node_id, layout), now.metrics, continued=True)
        self._steps.free(task.frees, now)

    def note_age(self, run: RunNode, now: InStep) -> None:
        """How many versions older than the trainer's the weights were that began the responses of the step."""
        node, staleness = self._run.graph.nodes[run.node_id], self._run.plan.max_staleness
        if not node.generates or not (staleness or self._draws.repeats) or self._transport.rank != run.layout.ranks[0]:
            return
        versions = now.spaces[node.id].versions
        newest = self._policies.versions_of(now.step + staleness, self._run.graph.changed_before(node))
        ages = newest[node.generates[0]] - versions
        now.metrics.mean(f"{node.id}/staleness", ages.sum(), float(len(versions)))

    def _kept(self, node: Node, layout: Layout, now: InStep) -> AbstractContextManager[NodeCall]:
        return self._inputs.around(node, layout, now, self._run, self._transport.world_size)

    def _call(
        self, node: Node, space: RowSpace, layout: Layout, values: dict[str, Any], now: InStep
    ) -> tuple[Any, Calls]:
        """What the node makes, and what it generated from."""
        context, part = self._context, self._draws.part_of(node.id)
        context.under_way = None
        versions = self._policies.versions_of(now.step, self._run.graph.changed_before(node))
        running = Running(
            node, space, layout, now.draw, versions, now.metrics, part, dropped=self._dropped(node, layout, now)
        )
        context.running = running
        after = dict.fromkeys(node.after, Trained())
        with within_node(node.id, node.place, self._transport.rank):
            result = getattr(self._run.module, node.id)(**values, **after)
        context.running = None
        if part is not None and context.under_way is not None and len(context.under_way) != len(result.lengths):
            raise UserError(
                f"`trainer.partial_rollout` continues what `generate` gave, and node `{node.id}` returned other rows"
                f" ({node.place}); return all of them, and choose in a node of its own"
            )
        return result, running.calls

    def _read(self, node: Node, layout: Layout, now: InStep) -> tuple[dict[str, Any], RowSpace]:
        """The values that `node` reads, in its layout, and the row space that it runs in."""
        graph, space = self._run.graph, now.spaces[node.inside]
        values = {name: now.buffer.get(name, layout, now.spaces[graph.seen_in(node, name)]) for name in node.reads}
        values = graph.seen(node, values)
        here = space.held(layout, self._transport.rank)
        for name in node.each:
            below = now.spaces[graph.space_of(name)]
            counts = space.counts_below(here, below)
            each: Each[Any] = Each(values[name], on_device(counts, self._transport.device))
            out = left_out(below, node, now, graph)
            if out is not None:
                each = each_without(each, graph.type_of(name), out[space.below(below, layout, self._transport.rank)])
            values[name] = each
        if (dropped := self._dropped(node, layout, now)) is not None:
            values = {
                name: value if name in node.each else without_dropped(value, dropped) for name, value in values.items()
            }
        return values, space

    def _dropped(self, node: Node, layout: Layout, now: InStep) -> Tensor | None:
        """`[B]` bool on the CPU, which of the rows that a node sees here were dropped; None where none was."""
        space = now.spaces[node.inside]
        out = left_out(space, node, now, self._run.graph)
        return None if out is None else out[space.held(layout, self._transport.rank)]

    def _returned(self, node: Node, result: Any, calls: Calls, above: RowSpace) -> Rollout:
        if not isinstance(result, Rollout):
            raise UserError(f"node `{node.id}` returned {type(result).__name__}; return what `generate` gives")
        return calls.returned(result, above.path.shape[1])

    def _made(self, node: Node, layout: Layout, now: InStep, result: Any, above: RowSpace, calls: Calls) -> RowSpace:
        """The rows that a node made, below those that it saw, and the metrics of its responses."""
        made = new_rows(node, result, above, layout, self._transport.rank)
        numbers = {"lengths": made.lengths, "tokens": made.tokens, "versions": made.versions}
        space = self._steps.gather(node.id, layout, now, made.path, **numbers)
        if node.generates and self._draws.partial is None and layout.publishes(self._transport.rank):
            measure(node.id, result, now.metrics, calls.tokens)
        return space
