"""Whether a step compares trainer and engine by its own rows, with each of its weights."""

from __future__ import annotations

import pytest

from rlflow import PerSample, PerToken, Rollout, node
from rlflow.controller.policies import scores_its_rows
from rlflow.dag.graph import Graph
from rlflow.types import After, Each
from rlflow.values.batch import Batch
from tests.dag.modules import GRPO


class Twice(GRPO):
    """Generates again with the weights after the first training, and scores these rows before the second."""

    ref_logprobs = None

    @node(role="actor", type="train")
    def first_loss(self, rollout: Rollout) -> PerToken: ...

    @node(generates="actor")
    def again(self, batch: Batch, first_loss: After) -> Rollout: ...

    @node(role="actor", type="train")
    def actor_loss(self, again: Rollout) -> PerToken: ...


class OnlyRewarded(Twice):
    """The second generation is rewarded, and not scored by the model."""

    @node
    def again_rewards(self, again: Rollout) -> PerSample: ...

    @node
    def again_value(self, batch: Batch, again_rewards: Each[PerSample]) -> PerSample: ...

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, again_value: PerSample) -> PerToken: ...


class TooLate(GRPO):
    """An algorithm whose rows are scored after another loss has changed the weights."""

    ref_logprobs = old_logprobs = None

    @node(role="actor", type="train")
    def a_loss(self, batch: Batch) -> PerToken: ...

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, a_loss: After) -> PerToken: ...


@pytest.mark.parametrize(("module", "said"), [(GRPO, True), (Twice, True), (OnlyRewarded, False), (TooLate, False)])
def test_rows_of_all_weights_of_a_step_are_scored_or_not(module: type, said: bool) -> None:
    assert scores_its_rows("actor", Graph.read(module(), ("actor", "reference"))) is said


@pytest.mark.parametrize(("module", "said"), [(GRPO, True), (Twice, False)])
def test_rows_that_are_scored_only_in_training_with_dropout_are_not_compared(module: type, said: bool) -> None:
    assert scores_its_rows("actor", Graph.read(module(), ("actor", "reference")), draws_dropout=True) is said
