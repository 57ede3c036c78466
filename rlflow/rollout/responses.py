"""Responses as far as they got: those that were cut off go on where they stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlflow.errors import UserError
from rlflow.rollout.engine import Completion
from rlflow.values.columns import join_rows, to_device
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout


@dataclass(frozen=True)
class Part:
    """How far responses get at once, where long ones are cut off and continued later.

    Attributes:
        max_tokens: By which a response grows at most.
        begun: The responses to the first prompts as far as they got, of the same sampling; None where all begin.
    """

    max_tokens: int
    begun: Rollout | None = None


@dataclass(frozen=True)
class Responses:
    """`B` responses, finished, cut off or not begun, on the CPU.

    Attributes:
        response_ids: `[B, T]` int64, right-padded.
        logprobs: `[B, T]`, the engine's.
        versions: `[B, T]` int32, of the policy that generated each token.
        lengths: `[B]` int64.
        finished: `[B]` bool, ended by a stop token.
    """

    response_ids: PerToken
    logprobs: PerToken
    versions: PerToken
    lengths: PerSample
    finished: PerSample

    @classmethod
    def new(cls, count: int, dtype: torch.dtype) -> Responses:
        """So many that are not begun, with logprobs of this dtype."""
        none = torch.zeros(count, 0, dtype=torch.int64)
        return cls(none, none.to(dtype), none.int(), none.sum(dim=1), none.sum(dim=1).bool())

    @classmethod
    def after(cls, begun: Rollout, path: RowPath) -> Responses:
        """Those of `begun`, then new ones.

        Args:
            begun: The first of them, as far as they got.
            path: Of all `B`.

        Raises:
            UserError: They were begun with other numbers of responses to a prompt.
        """
        there = to_device(begun, torch.device("cpu"))
        new = len(path) - len(there.path)
        require_continued(there.path, path)
        first = cls(there.response_ids, there.logprobs, there.versions, there.lengths, there.finished)
        joined: Responses = join_rows([first, cls.new(new, there.logprobs.dtype)], cls)
        return joined

    @classmethod
    def of(cls, rollout: Rollout, rows: Tensor, dtype: torch.dtype) -> Responses:
        """Those at `rows` `[K]` of `rollout`, to be continued, with logprobs of this dtype."""
        there = to_device(rollout, torch.device("cpu")).take(rows)
        return cls(there.response_ids, there.logprobs.to(dtype), there.versions, there.lengths, there.finished)

    def room(self, max_tokens: int) -> Tensor:
        """`[B]` int64, by how many tokens each may grow to be `max_tokens` long; 0 where it has ended."""
        left: Tensor = (max_tokens - self.lengths).clamp(min=0).masked_fill(self.finished, 0)
        return left

    def tokens(self, row: int) -> list[int]:
        """Those of one."""
        tokens: list[int] = self.response_ids[row, : self.lengths[row]].tolist()
        return tokens

    def extended(self, completions: Mapping[int, Completion], version: int) -> Responses:
        """With what `version` generated, by row, behind them."""
        made = [len(completions[row].token_ids) if row in completions else 0 for row in range(len(self.lengths))]
        lengths = self.lengths + torch.tensor(made, dtype=torch.int64)
        wider = max(lengths.tolist(), default=0) - self.response_ids.shape[1]
        columns = self.response_ids, self.logprobs, self.versions
        ids, logprobs, versions = (pad(column, (0, wider)) for column in columns)
        finished = self.finished.clone()
        for row, completion in completions.items():
            new = slice(int(self.lengths[row]), int(lengths[row]))
            ids[row, new] = torch.tensor(completion.token_ids, dtype=torch.int64)
            logprobs[row, new] = torch.tensor(completion.logprobs, dtype=logprobs.dtype)
            versions[row, new] = version
            finished[row] = completion.finished
        return Responses(ids, logprobs, versions, lengths, finished)


def require_continued(begun: RowPath, path: RowPath) -> None:
    """Refuse to continue responses beside other numbers of responses to a prompt.

    Args:
        begun: Of those that were cut off.
        path: Of all that are asked for, which begin with those.

    Raises:
        UserError: They were begun with other numbers.
    """
    if not torch.equal(begun.numbers, path.numbers[: len(begun)]):
        n, before = (int((of.root == path.root[0]).sum()) for of in (path, begun))
        raise UserError(
            f"{before} responses to a prompt were cut off and are to go on, and {n} are asked for; continue with the"
            " same `group_size`"
        )


def under_way(rollout: Rollout, max_tokens: int) -> Tensor:
    """`[B]` bool, which responses were cut off before they ended and may go on to `max_tokens`."""
    cut_off: Tensor = ~rollout.finished & (rollout.lengths < max_tokens)
    return cut_off
