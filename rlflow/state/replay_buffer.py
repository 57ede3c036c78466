"""Rows of tokens that a module stores from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.batch import TokenRows
from rlflow.values.columns import to_device
from rlflow.values.host_copy import on_host
from rlflow.values.path import hashed
from rlflow.values.ragged import Ragged


class ReplayBuffer:
    """The prompts with responses that were added last, such as those that a discriminator must not forget.

    It is an attribute of a module, and saved in checkpoints. All ranks must add the same rows, so gather the rows
    first. The rows that are drawn from it then depend neither on the rank nor on the number of ranks.

        self.replay = ReplayBuffer(1024)                                     # in `__init__` or `__post_init__`
        self.replay.add(self.all_rows(prompts), self.all_rows(responses))    # in a node
        self.replay.sample(rollout.group)                                    # one row for each of this rank's

    Args:
        capacity: Maximum number of rows. The oldest rows are removed.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise UserError(f"`capacity` of a ReplayBuffer is {capacity}; give 1 or more rows")
        self.capacity = capacity
        self._prompts = self._responses = Ragged.from_lists([])

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompts: Ragged, responses: Ragged) -> None:
        """Add rows after the rows that are stored already.

        Args:
            prompts: Token ids, int64, of rows of all ranks, as `RLModule.all_rows` gives them.
            responses: Responses of the same rows.
        """
        if len(prompts) != len(responses):
            raise UserError(
                f"a ReplayBuffer was given {len(prompts)} prompts and {len(responses)} responses; give a response of"
                " each prompt"
            )
        self._prompts, self._responses = (
            self._last(old.followed_by(new.on_host()))
            for old, new in ((self._prompts, prompts), (self._responses, responses))
        )

    def sample(self, keys: Tensor, seed: int = 0) -> TokenRows:
        """Draw one row for each key. A key draws the same row from the same content; several keys may draw one row.

        Args:
            keys: `[B]` int64, numbers that differ over rows and steps, such as `rollout.group`.
            seed: Seed of the draw.

        Returns:
            `B` rows on the device of `keys`.

        Raises:
            UserError: There are no rows yet.
        """
        if not len(self):
            raise UserError("a ReplayBuffer was sampled before rows were added; look at `len` of it first, or add some")
        chosen = torch.tensor(
            [hashed(f"{seed}/{key}") % len(self) for key in on_host(keys).tolist()], dtype=torch.int64
        )
        rows = TokenRows.padded(self._prompts.take(chosen), self._responses.take(chosen))
        moved: TokenRows = to_device(rows, keys.device)
        return moved

    def state_dict(self) -> dict[str, Tensor]:
        """The rows, as tensors by name."""
        return {
            "prompts": self._prompts.values,
            "prompt_lengths": self._prompts.lengths,
            "responses": self._responses.values,
            "response_lengths": self._responses.lengths,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the rows from `state_dict`; if there are more than `capacity`, the last ones."""
        self._prompts = self._last(Ragged(state["prompts"], state["prompt_lengths"]))
        self._responses = self._last(Ragged(state["responses"], state["response_lengths"]))

    def _last(self, rows: Ragged) -> Ragged:
        return rows.take(torch.arange(max(0, len(rows) - self.capacity), len(rows)))
