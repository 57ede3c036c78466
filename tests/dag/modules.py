"""Small algorithms that the tests of the graph read."""

from __future__ import annotations

from rlflow.dag.node import node
from rlflow.values.batch import Batch
from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.each import Each
from rlflow.values.rollout import Rollout


class GRPO:
    """The usual graph: diamonds, and several readers of one value."""

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout: ...

    @node
    def rewards(self, rollout: Rollout) -> PerSample: ...

    @node
    def advantages(self, rollout: Rollout, rewards: PerSample) -> PerSample: ...

    @node(role="reference")
    def ref_logprobs(self, rollout: Rollout) -> PerToken: ...

    @node(role="actor")
    def old_logprobs(self, rollout: Rollout) -> PerToken: ...

    @node(role="actor", type="train")
    def actor_loss(
        self,
        rollout: Rollout,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken: ...


class ReMax(GRPO):
    """Values of prompts read with samples: the reward of the greedy response is the baseline of every sample."""

    ref_logprobs = None

    @node(role="rollout")
    def greedy(self, batch: Batch) -> Rollout: ...

    @node
    def greedy_rewards(self, greedy: Rollout) -> PerSample: ...

    @node
    def baseline(self, batch: Batch, greedy_rewards: Each[PerSample]) -> PerSample: ...

    def advantages(self, rewards: PerSample, baseline: PerSample) -> PerSample: ...


class Filtered(GRPO):
    """Groups are kept or drawn anew; `old_logprobs`, of smaller depth than the filter, still waits for it."""

    ref_logprobs = None

    @node(type="filter")
    def useful(self, rollout: Rollout, rewards: PerSample) -> PerSample: ...


class SFT:
    """No rollout: one train node that reads the dataset's rows."""

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken: ...


ROLES = ("actor", "reference")
