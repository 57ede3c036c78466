"""How prompts are drawn: loaded, repeated until a step is full, and held back while their responses are cut off."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlflow.checkpoint.kept_rows import SURPLUS, UNDER_WAY
from rlflow.controller.filling import Filling
from rlflow.controller.in_step import InStep
from rlflow.controller.partial import PartialRollout
from rlflow.controller.run import Run
from rlflow.controller.steps import Steps
from rlflow.dag.node import BATCH
from rlflow.dag.tasks import Fill, HoldBack, Load, Task
from rlflow.data.loader import Prefetch
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.message import to_message
from rlflow.errors import UserError
from rlflow.rollout.sampling import Part
from rlflow.values.batch import Batch
from rlflow.values.columns import to_device
from rlflow.values.layout import Layout


class Draws:
    """Draws prompts for steps.

    Args:
        run: The run on this rank.
        loader: Loader of the training rows.
        steps: Steps in progress.

    Attributes:
        count: How often prompts were drawn, the draw in progress included.
        repeats: Whether a step takes as many draws as it needs.
        partial: Holds back responses that are cut off; None where none are.
    """

    def __init__(self, run: Run, loader: Prefetch, steps: Steps) -> None:
        self.count = 0
        self.repeats = run.plan.fill is not None
        self._run = run
        self._loader = loader
        self._transport = run.transport
        self._device = run.strategy.root_device
        self._steps = steps
        self.partial: PartialRollout | None = None
        keep, longest = run.keeping, run.max_tokens_per_draw
        self._filling = Filling(run.graph, run.plan, run.transport, loader.prompts_per_step, run.module.max_draws, keep)
        for task in run.plan.every():
            if isinstance(task, HoldBack) and longest is not None:
                self.partial = PartialRollout(run.plan, task, run.transport, longest, keep)

    def part_of(self, node_id: str) -> Part | None:
        """How far the responses of a node get; None where they are not cut off."""
        return None if self.partial is None else self.partial.part_of(node_id)

    def load(self, task: Load, now: InStep) -> None:
        """Read this rank's rows of a draw."""
        layout = task.layout
        self._begin(now.draw, layout)
        batch, ids = self._loader.batch(now.draw, layout.shard(self._transport.rank), layout.shards)
        lengths = batch.lengths if isinstance(batch, Batch) else torch.zeros_like(ids)  # of pairs nothing is per token
        space = self._steps.gather(BATCH, layout, now, ids[:, None], lengths=lengths, tokens=batch.tokens)
        on_device = to_device(batch, self._device)
        now.buffer.put(BATCH, on_device, self._run.graph.type_of(BATCH), space, layout)
        if self.partial is not None:
            self.partial.join(now)

    def fill(self, task: Fill, now: InStep, run: Callable[[Task, int], None]) -> None:
        """Repeat tasks on the next draw until the step's groups are there.

        Args:
            task: What is repeated.
            now: The step.
            run: Runs one task.
        """
        self._filling.run(task, now, lambda: self._draw(task, now, run))
        if self.partial is not None:
            held = self.partial.held
            now.metrics.number("rollout/under_way", 0.0 if held is None else float(len(held.roots)))

    def log(self, now: InStep) -> None:
        """How many draws there were, on ranks that count them."""
        if self.repeats:
            now.metrics.largest(self._total, float(self.count))

    def learn(self, reduced: dict[str, float]) -> None:
        """Take the count from the metrics of a step, on ranks without a part in drawing."""
        self.count = int(reduced.get(self._total, self.count))

    def kept(self) -> dict[str, Kept]:
        """Groups beyond a step's, and those that are held back, by name."""
        found = {SURPLUS: self._filling.surplus, UNDER_WAY: None if self.partial is None else self.partial.held}
        return {name: rows for name, rows in found.items() if rows is not None}

    def restore(self, count: int, read: Callable[[str, Kept], Kept | None]) -> None:
        """Go on after `count` draws, with what `read` finds of `kept`."""
        self.count = count
        self._filling.restore(read)
        if self.partial is not None:
            self.partial.restore(read)

    @property
    def _total(self) -> str:
        return f"{self._filling.part}/draws_total"

    def _draw(self, task: Fill, now: InStep, run: Callable[[Task, int], None]) -> bool:
        """The tasks of a `Fill` on the next prompts; whether any group went through all of them."""
        now.draw = self.count
        self.count += 1
        for repeated in task.tasks:
            run(repeated, now.step)
            if isinstance(repeated, HoldBack) and self.partial is not None and self.partial.all_held:
                return False
        return True

    def _begin(self, draw: int, layout: Layout) -> None:
        """Let the module choose the rows of the epoch that begins with this draw, if one does."""
        epoch = self._loader.begin(draw)
        if epoch is None:
            return
        ranks = self._transport.all_gather(to_message(epoch.digest), layout.ranks)
        if any(not torch.equal(ranks[0], other) for other in ranks):
            raise UserError(
                f"`choose_prompts` chose other rows of epoch {epoch.number + 1} on other ranks; let them follow from"
                " `epoch`, the prompts that it is given and the module's memories alone"
            )
