"""`RewardModel`, which scores whole responses."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.handle import ModelHandle
from rlflow.models.packing import Scorable, no_rows, whole
from rlflow.models.scalar import ScalarModel
from rlflow.values.cuts import PerSample


class RewardModel(ModelHandle):
    """A model with one number for a response: `self.reward_model = RewardModel(path, trainable=False)`.

    It is a Hugging Face model for sequence classification with one label. To be trained, it may be loaded from a
    causal language model, and starts with an output layer of zeros. Constructing it loads nothing.
    """

    def scores(self, rows: Scorable) -> PerSample:
        """The score of each row, read at its last response token; at the prompt's last where there is no response.

        Args:
            rows: A `Batch`, a `Rollout`, or anything with their `prompt_ids`, `response_ids` and `lengths`.

        Returns:
            `[B]` in float32 (float64 where the model is).
        """
        (scores,) = self._scores(whole(rows))
        return scores[:, 0]

    def score_nothing(self) -> Tensor:
        """See `ModelHandle.score_nothing`."""
        return self._scores(no_rows())[0].sum()

    def _read(self, path: Path, dtype: torch.dtype, device: torch.device, empty: bool) -> ScalarModel:
        return ScalarModel.load(
            path, dtype, device, self.gradient_checkpointing, self.trainable, empty, self.trust_remote_code
        )
