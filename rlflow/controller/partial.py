"""Partial rollout: long responses are cut off, held back with their group, and go on with the next draw of prompts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.checkpoint.kept_rows import UNDER_WAY
from rlflow.controller.in_step import InStep
from rlflow.controller.step_state import Keep
from rlflow.dag.node import BATCH
from rlflow.dag.planner import Plan
from rlflow.dag.tasks import HoldBack
from rlflow.databuffer.kept import Kept
from rlflow.databuffer.transport import Transport
from rlflow.rollout.sampling import Part
from rlflow.values.rollout import Rollout


class PartialRollout:
    """The groups that are under way between two draws, with their prompts, on the ranks that began them.

    Args:
        plan: Of all ranks; it holds back what `task` names.
        task: What is held back.
        transport: To the other ranks.
        max_tokens: By which a response grows in one draw at most.
        keep: Keeps rows and values of this rank.

    Attributes:
        held: Groups with responses that were cut off; None without.
        all_held: Whether the last draw left no group to go on with.
    """

    def __init__(self, plan: Plan, task: HoldBack, transport: Transport, max_tokens: int, keep: Keep) -> None:
        self.held: Kept | None = None
        self.all_held = False
        self._task = task
        self._layout = plan.layouts()[task.node_id]
        self._transport = transport
        self._max_tokens = max_tokens
        samples = [BATCH, task.node_id]
        self._prompts = keep([BATCH], [BATCH])
        self._samples = keep(samples, samples)

    def join(self, now: InStep) -> None:
        """Put the prompts of the groups under way before those just loaded; called by the ranks that load."""
        if self.held is not None:
            prompts = Kept(self.held.rank, {BATCH: self.held.spaces[BATCH]}, {BATCH: self.held.values[BATCH]})
            self._prompts.put(Kept.joined([prompts, self._prompts.of(now)]), now)

    def part_of(self, node_id: str) -> Part | None:
        """How far the responses of a node get; None where they are not cut off."""
        if node_id != self._task.node_id:
            return None
        begun: Rollout | None = None if self.held is None else self.held.values[node_id].rows
        return Part(self._max_tokens, begun)

    def hold_back(self, now: InStep, under_way: Tensor | None) -> None:
        """Leave the step the groups whose responses have all ended, and hold back the others.

        Args:
            now: Has the samples of this draw, and of those before that were under way.
            under_way: `[B]` bool, which of this rank's were cut off; None where `generate` was not asked.
        """
        drawn = self._samples.of(now)
        space = now.spaces[self._task.node_id]
        if under_way is None:
            under_way = torch.zeros(len(space.held(self._layout, self._transport.rank)), dtype=torch.bool)
        here = under_way.to("cpu", torch.uint8)
        cut_off = space.gathered(self._layout, here, self._transport, self._task.members).bool()
        waiting = space.roots[cut_off].unique()
        ended = drawn.roots[~torch.isin(drawn.roots, waiting)]
        self.held = drawn.only(waiting) if len(waiting) else None
        self.all_held = not len(ended)
        self._samples.put(drawn.only(ended), now)

    def restore(self, read: Callable[[str, Kept], Kept | None]) -> None:
        """Take back what was held, which `read` finds by its name, told what it is made of."""
        if self._transport.rank in self._task.members:
            self.held = read(UNDER_WAY, self._samples.empty())
