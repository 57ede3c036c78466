"""`ValueModel`, the critic: how much reward is still to come at each point of a response."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.handle import ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packing import Scorable, no_rows, whole
from rlflow.models.scalar import ScalarModel
from rlflow.values.cuts import PerSample, PerToken


class ValueModel(ModelHandle):
    """A model with one number at each token: `self.critic = ValueModel(self.model)`. Constructing it loads nothing.

    It is a Hugging Face model for sequence classification with one label. Loaded from a causal language model, which
    has no such output layer, it starts with one of zeros, so that all values are 0 at first.
    """

    default_optimizer = Optimizer(lr=1e-5)  # what is learned from zeros takes longer steps than what is tuned

    def values(self, rows: Scorable) -> PerToken:
        """The value before each response token: at the token before it, where its logprob comes from too.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B, T]` in float32 (float64 where the model is), 0 where padded.
        """
        (values,) = self._scores(rows)
        return values

    def final_values(self, rows: Scorable) -> PerSample:
        """The value after the last response token, `[B]`: what a response that was cut short might still get.

        Without a response it is the value after the prompt.
        """
        (values,) = self._scores(whole(rows))
        return values[:, 0]

    def score_nothing(self) -> Tensor:
        """See `ModelHandle.score_nothing`."""
        return self._scores(no_rows())[0].sum()

    def _read(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool) -> ScalarModel:
        return ScalarModel.load(
            path, dtype, device, self.gradient_checkpointing, self.trainable, empty, self.trust_remote_code
        )
