"""How nodes run: what they read, the call, the rows that they make, and what becomes of the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.callbacks.callback import Callback
from rlflow.callbacks.hooks import Callbacks
from rlflow.controller.context import NodeContext, Running
from rlflow.controller.draws import Draws
from rlflow.controller.finite import require_finite
from rlflow.controller.in_step import InStep
from rlflow.controller.policies import Policies
from rlflow.controller.program import Program
from rlflow.controller.responses import measure
from rlflow.controller.steps import Steps
from rlflow.controller.training import Training
from rlflow.dag.node import Node
from rlflow.dag.tasks import HoldBack, RunNode, TrainNode
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.errors import UserError
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.layout import Layout
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout


class Nodes:
    """Runs the nodes of one rank.

    Args:
        program: What is run.
        policies: That generate.
        strategy: Trains.
        context: Of this rank; the module is attached to it.
        transport: To the other ranks.
        callbacks: Told of nodes.
        steps: Those in progress.
        draws: Of prompts.
    """

    def __init__(
        self,
        program: Program,
        policies: Policies,
        strategy: TrainingStrategy,
        context: NodeContext,
        transport: Transport,
        callbacks: Callbacks,
        steps: Steps,
        draws: Draws,
    ) -> None:
        self._program = program
        self._policies = policies
        self._context = context
        self._transport = transport
        self._callbacks = callbacks
        self._steps = steps
        self._draws = draws
        repeated = () if program.plan.fill is None else program.plan.fill.tasks
        self._repeated = {task.node_id for task in repeated if isinstance(task, RunNode)}
        self._training = Training(
            program.module, program.graph, strategy, transport, program.seed, before_update=policies.before_update
        )

    def run(self, task: RunNode, now: InStep) -> None:
        """Call a node on this rank's rows, and keep what it makes."""
        node, layout = self._program.graph.nodes[task.node_id], task.layout
        self._callbacks.call(Callback.on_node_start, node.id)
        values, read = self._read(node, layout, now)
        result = self._call(node, read, layout, values, now)
        space = read
        if node.samples:
            space = self._made(node, layout, now, result, read)
            if node.id not in self._repeated:
                self.note_age(task, now)
        elif node.samples_in_place:
            here, ranks = on_host(result.lengths), layout.ranks
            now.lengths[node.id] = read.gathered(layout, here, self._transport, ranks)
        elif node.role is not None:
            self._policies.scored(node.role)
        now.buffer.put(node.id, result, node.returns, space, layout, now.lengths.get(node.id))
        if node.kind == "compute" or node.kind == "filter":
            require_finite(node, result, read, layout, self._transport)
        self._steps.free(task.frees, now)
        self._callbacks.call(Callback.on_node_end, node.id)

    def train(self, task: TrainNode, now: InStep) -> None:
        """Train a role with this rank's rows, from the first step that does."""
        node = self._program.graph.nodes[task.node_id]
        values, space = self._read(node, task.layout, now)
        if self._training.begun(node, now.step):
            self._context.running = Running(node, space, task.layout, now.draw, {}, now.metrics)
            self._training.run(node, values, space, task.layout, now.metrics)
            self._context.running = None
        self._steps.free(task.frees, now)

    def hold_back(self, task: HoldBack, now: InStep) -> None:
        """Leave the step the groups whose responses have all ended."""
        partial, layout = self._draws.partial, self._program.layouts[task.node_id]
        assert partial is not None
        partial.hold_back(now, self._context.under_way)
        if layout.publishes(self._transport.rank):
            measure(task.node_id, now.buffer.get(task.node_id, layout), now.metrics, continued=True)
        self._steps.free(task.frees, now)

    def note_age(self, run: RunNode, now: InStep) -> None:
        """How many versions older than the trainer's the weights were that began the responses of the step."""
        node, staleness = self._program.graph.nodes[run.node_id], self._program.plan.max_staleness
        if not node.samples or not (staleness or self._draws.repeats) or self._transport.rank != run.layout.ranks[0]:
            return
        versions = now.spaces[node.id].versions
        ages = self._policies[node.generates[0]].version_after(now.step) - versions
        now.metrics.mean(f"{node.id}/staleness", ages.sum(), float(len(versions)))

    def _call(self, node: Node, space: RowSpace, layout: Layout, values: dict[str, Any], now: InStep) -> Any:
        context, part = self._context, self._draws.part_of(node.id)
        context.under_way = None
        context.running = Running(
            node, space, layout, now.draw, self._policies.versions_of(now.step), now.metrics, part
        )
        result = getattr(self._program.module, node.id)(**values)
        context.running = None
        if part is not None and context.under_way is not None and len(context.under_way) != len(result.lengths):
            raise UserError(
                f"`trainer.partial_rollout` continues what `generate` gave, and node `{node.id}` returned other rows"
                f" ({node.place}); return all of them, and choose in a node of its own"
            )
        return result

    def _read(self, node: Node, layout: Layout, now: InStep) -> tuple[dict[str, Any], RowSpace]:
        """The values that `node` reads, in its layout, and the row space that it runs in."""
        space = now.spaces[node.inside]
        values = {name: now.buffer.get(name, layout, space) for name in node.reads}
        return self._program.graph.seen(node, values), space

    def _made(self, node: Node, layout: Layout, now: InStep, result: Rollout, above: RowSpace) -> RowSpace:
        """The rows that a node generated, below those that it read, and the metrics of its responses."""
        if not isinstance(result, Rollout):
            raise UserError(f"node `{node.id}` returned {type(result).__name__}; return what `generate` gives")
        of_rows = [result.path.numbers, result.lengths, result.prompt_ids.lengths, result.version]
        bring_over(of_rows)
        path, lengths, prompt_lengths, versions = map(on_host, of_rows)
        depth = above.path.shape[1]
        self._require_parents(node, above.path[above.held(layout, self._transport.rank)], path[:, :depth])
        space = self._steps.gather(
            node.id,
            layout,
            now,
            RowPath(path, result.path.levels).below(depth, node.id).numbers,
            lengths=lengths,
            tokens=lengths + prompt_lengths,
            versions=versions,
        )
        if self._draws.partial is None and layout.publishes(self._transport.rank):
            measure(node.id, result, now.metrics, continued=False)
        return space

    def _require_parents(self, node: Node, held: Tensor, parents: Tensor) -> None:
        """Refuse rows that descend from none of those that the node reads here: paths `[P, depth]` and `[B, depth]`."""
        numbers = torch.unique(torch.cat([held, parents]), dim=0, return_inverse=True)[1]
        orphans = ~torch.isin(numbers[len(held) :], numbers[: len(held)])
        if bool(orphans.any()):
            row = int(orphans.nonzero()[0])
            raise UserError(
                f"row {row} that node `{node.id}` returned on rank {self._transport.rank} has the parent"
                f" {'.'.join(map(str, parents[row].tolist()))}, which is no row of `{node.inside}` that it reads there"
                f" ({node.place}); return rows that were generated from those it reads"
            )
