"""Sampled responses.

`B` is the number of rows on this rank, `T` the longest response among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.batch import Batch, WithPaths
from rlflow.values.column_kinds import ColumnKind, OnDemand, PerSample, PerToken
from rlflow.values.columns import columns, fill_in, join_rows, optional, take_rows
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.not_sent import NotSent
from rlflow.values.path import RowPath
from rlflow.values.protocols import computed_from
from rlflow.values.ragged import Ragged
from rlflow.values.truncation import END, NOTED, by_token


class Ending(IntEnum):
    """Reason why a conversation is over."""

    DONE = 0  # its environment ended it, or a policy with tools called none
    TURNS = 1  # it reached the limit of turns, or of tool calls
    TOKENS = 2  # it reached the limit of tokens
    FAILED = 3  # its environment failed


@dataclass(frozen=True, kw_only=True)
class Rollout(WithPaths):
    """Sampled responses, `n` consecutive rows for each prompt.

    Two prompts with two samples each, in conversations with a calculator that one sample has called. `T` is 7, the end
    token is 2, and `.` stands for padding, which is 0 or False:

        field          row 0         row 1         row 2                  row 3
        prompt_ids     10 11         10 11         12 13 14               12 13 14
        response_ids   20 21 2 ....  22 2 .....    23 24 25 26 27 28 29   30 31 40 41 42 32 2
        loss_mask      1 1 1 ....    1 1 .....     1 1 1 1 1 1 1          1 1 . . . 1 1
        lengths        3             2             7                      7
        logprobs       -.1 -.2 -.3   -.1 -.4       -.1 ... -.7            -.1 -.2 0 0 0 -.3 -.4
        finished       True          True          False, it was cut      True
        path           4 0           4 1           7 0                    7 1
        version        3             3             3                      3
        versions       3 3 3 ....    3 3 .....     3 3 3 3 3 3 3          3 3 3 3 3 3 3
        inherited      0             0             0                      0
        experts        none          none          none                   none
        support        none          none          none                   none
        support_logprobs  none       none          none                   none
        temperature    0             0             0                      0
        segments       3             2             7                      2 3 2
        turn_rewards   1.0           0.0           0.0                    0.5 1.0
        ended          DONE          DONE          TOKENS                 DONE
        seat           0             0             0                      0
        branch         0             0             0                      0
        calls          none          none          none                   none
        texts          "5"           "no"          "let me see, I"        "it is 5"
        messages       all messages, a list of dicts for each row
        rows           {"question": "2+3=", ...} of the dataset, for rows 0 and 1 alike
        pictures       none, or such as 14 16 for rows 0 and 1 alike
        progress       {} where no conversation is cut off

    Other columns follow from these: `group` (4 4 7 7), `index` (0 1 0 1), `episode` (0 1 0 1), `turns` (1 1 1 2),
    `policy_lengths` (3 2 7 4), and `turn`, which is 0 0 -1 -1 -1 1 1 for row 3. A response that is one turn, without an
    environment, has no `segments`, `turn_rewards` and `messages`.

    Attributes:
        prompt_ids: Token ids of each sample's prompt.
        response_ids: `[B, T]` int64, right-padded.
        loss_mask: `[B, T]` bool, True on generated tokens, the end-of-sequence token included.
        lengths: `[B]` int64, number of response tokens of each row.
        logprobs: `[B, T]` float32, the engine's log-probability of each token, after temperature, under the version of
            the policy that generated the token.
        finished: `[B]` bool, False where the response was cut at the longest allowed length. A conversation is
            unfinished only if it had no tokens left. It is finished if it reached the limit of turns or calls, or
            failed.
        path: Path of each sample: the id of its prompt, then its number among the prompt's samples.
        version: `[B]` int64, version of the policy that generated the sample; if there are several, the version of the
            oldest token.
        versions: `[B, T]` int32, version of the policy that generated each token.
        inherited: `[B]` int64, how many of the first tokens were copied from the row that this row continues; 0 if it
            answers a prompt. `inherited_mask` marks these tokens in `[B, T]`.
        experts: `[sum, layers, k]` uint8 (int16 beyond 256 experts), the experts that the engine chose for each token
            that it read, likeliest first. It read the prompt, and the response without its last token. There are no
            entries if no model replays experts.
        support: `[sum]` int32: for each token of a response, the ids of the other tokens from which it was sampled, and
            then -1. In `21 23 -1 -1 5 -1` the first token was sampled from three tokens, the second only from itself,
            and the last from two. There are no entries if a response was sampled from the whole vocabulary. Models
            score each token over these tokens, see `Truncation`.
        support_logprobs: `[sum]` float32: for each token of `support` the engine's log-probability, and in the place of
            each -1 the log-probability of the sampled token. `sampler_logprobs` has them by token.
        temperature: `[B]` float64, the temperature that a row's dataset sets for its responses, see
            `MixedDataset.sampling`, or the call of `generate`. Models divide the row's logits by it. 0 where each model
            has its own, and NaN where a call continued the response at another temperature.
        segments: `[sum]` int64, numbers of tokens in a conversation: of the policy's first turn, of the answer to it,
            of the second turn, and so on. There are no entries if a response is one turn.
        turn_rewards: `[sum]`, the environment's reward for each turn of a conversation. There are no entries if a
            response is one turn.
        ended: `[B]` int64, why a conversation ended, see `rlflow.values.rollout.Ending`. A response that is one turn
            has `DONE` if it is finished, and `TOKENS` if it was cut.
        seat: `[B]` int64, the seat from which a row sees its conversation, as a number among the environment's `seats`;
            0 if there are no seats.
        branch: `[B]` int64, number of each row among the rows of its episode, which are consecutive. An episode has
            several rows if an agent owns its loop, see `rlflow.Harness`, or if the policy plays several seats; else 0.
        calls: `[sum]` int64, for an agent that owns its loop: number of the call that made each turn of the episode.
            Rows of an episode share turns with the same number. Otherwise there are no entries.
        texts: Decoded responses without special tokens; for a conversation, the policy's last turn.
        messages: All messages of a conversation, including those of the prompt. Each has `role` and `content`. A turn
            of the policy also has `reward` and `tool_calls`, and a message after the last turn has `unread`. The last
            message has `ended`: who ended the conversation, and why. Empty if a response is one turn.
        rows: The dataset's row of each sample.
        pictures: `[sum]` int64, numbers of the pictures of each sample's prompt, see `Batch`.
        progress: State that is needed, in addition to the other columns, to continue a conversation that
            `trainer.partial_rollout` may cut off; see `rlflow.rollout.conversation`. Otherwise empty.
    """

    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    logprobs: PerToken
    finished: PerSample
    path: RowPath
    version: PerSample
    versions: PerToken
    inherited: PerSample = optional(torch.int64)
    experts: Ragged = optional(torch.uint8, model_input="per token")
    support: Ragged = optional(torch.int32, model_input="output layer")
    support_logprobs: Ragged = optional(torch.float32)
    temperature: PerSample = optional(torch.float64, model_input="output layer")
    segments: Ragged = optional(torch.int64)
    turn_rewards: Ragged = optional(torch.float32)
    ended: PerSample
    seat: PerSample = optional(torch.int64)
    branch: PerSample = optional(torch.int64)
    calls: Ragged = optional(torch.int64)
    texts: Annotated[list[str], ColumnKind.JSON, OnDemand]
    messages: Annotated[list[list[dict[str, Any]]], ColumnKind.JSON, OnDemand] = optional(list)
    rows: Annotated[list[dict[str, Any]], ColumnKind.JSON, OnDemand]
    pictures: Annotated[Ragged, ColumnKind.RAGGED, OnDemand] = optional(torch.int64, model_input="any")
    progress: Annotated[list[dict[str, Any]], ColumnKind.JSON, OnDemand] = optional(dict)

    def __post_init__(self) -> None:
        fill_in(self, "response_ids")

    @property
    @computed_from("inherited", "loss_mask")
    def inherited_mask(self) -> PerToken:
        """`[B, T]` bool, True on tokens that were copied from the row that this row continues.

        Several rows may continue one row, and so inherit the same token. Among the rows that a node returns, only the
        first of them has the token in its loss mask, so the token is trained once.
        """
        places = torch.arange(self.loss_mask.shape[1], device=self.inherited.device)
        mask: Tensor = places < self.inherited[:, None]
        return mask

    @property
    @computed_from("path", "branch", "seat")
    def episode(self) -> PerSample:
        """`[B]` int64, equal for the rows of one agent's episode, which count once in their group.

        It is the `index` of the episode's first row. In a game each seat counts by itself: what one seat wins another
        loses, so a mean over both would always be 0.
        """
        return self.index - self.branch.where(self.seat == 0, 0)

    @property
    @computed_from("path", "branch", "seat")
    def first(self) -> PerSample:
        """`[B]` bool, whether a row is the first of its `episode`, to count each episode once."""
        return self.episode == self.index

    @property
    @computed_from("path", "branch", "seat", "calls")
    def shared_turns(self) -> Tensor:
        """`[B, K]` int64, a number for each turn, equal if rows of an episode share the turn; -1 after the last turn.

        K is 0 if no agent owns its loop.
        """
        calls = self.calls.on_host()
        padded = calls.padded()
        episodes = torch.stack([on_host(self.group), on_host(self.episode)], dim=1)
        episode = torch.unique(episodes, dim=0, return_inverse=True)[1]
        numbers = episode[:, None] * (padded.shape[1] * len(padded)) + padded  # an episode has no more turns
        own = torch.arange(padded.shape[1]) < calls.lengths[:, None]
        return on_device(numbers.masked_fill(~own, -1), self.lengths.device)

    @property
    @computed_from("segments")
    def turns(self) -> PerSample:
        """`[B]` int64, how many turns of the policy each row has."""
        lengths = self.segments.lengths
        return on_device(((on_host(lengths) + 1) // 2).clamp(min=1), lengths.device)

    @property
    @computed_from("segments", "lengths")
    def policy_lengths(self) -> PerSample:
        """`[B]` int64, how many tokens of each row the policy wrote; equal to `lengths` without an environment."""
        if not len(self.segments.values):
            return self.lengths
        others = [int(each[1::2].sum()) for each in self.segments.on_host().rows()]
        return on_device(on_host(self.lengths) - torch.tensor(others), self.lengths.device)

    @property
    @computed_from("segments", "loss_mask", "lengths")
    def turn(self) -> PerToken:
        """`[B, T]` int64, number of the policy's turn that wrote each token; -1 if the policy did not write it."""
        lengths, width = on_host(self.lengths), self.loss_mask.shape[1]
        turn = torch.full((len(lengths), width), -1, dtype=torch.int64)
        for row, segments in enumerate(each.tolist() for each in self.segments.on_host().rows()):
            at = 0
            for number, tokens in enumerate(segments or [int(lengths[row])]):
                if number % 2 == 0:
                    turn[row, at : at + tokens] = number // 2
                at += tokens
        return on_device(turn, self.loss_mask.device)

    @property
    @computed_from("loss_mask", "lengths", "support", "support_logprobs")
    def sampler_logprobs(self) -> Tensor:
        """`[B, T, K]`, the engine's log-probability of each token from which a response token was sampled.

        The sampled token is the last of a place, and `-inf` stands behind it. K is 0 where all were sampled from the
        whole vocabulary.
        """
        support, values, lengths = self.support.on_host(), self.support_logprobs.on_host().values, on_host(self.lengths)
        there = torch.arange(self.loss_mask.shape[1]) < lengths[:, None]
        nothing = values.new_full((int(lengths.sum()),), -torch.inf)
        if len(support.values) != len(values):
            raise UserError(
                f"the engine noted {len(support.values)} tokens that it sampled from, and {len(values)} of their"
                " log-probabilities; an engine with `return_support` gives both"
            )
        if len(values) and bool(((support.lengths == 0) & (lengths > 0)).any()):
            raise UserError(
                "some responses were sampled from all tokens and others from some, so `sampler_logprobs` has none"
                " for the first; set `top_k` of the policy, and in the `sampling` of every dataset that has one"
            )
        found = by_token(support, values, lengths, nothing) if len(values) else nothing[:, None][:, :0]
        by_place = values.new_full((*there.shape, found.shape[1]), -torch.inf)
        by_place[there] = found
        return on_device(by_place, self.loss_mask.device)

    @property
    @computed_from("turn_rewards")
    def returns(self) -> Tensor:
        """`[B, K]`, the reward of each turn, 0 after a row's last turn; K is 0 if no row is a conversation."""
        counts = on_host(self.turn_rewards.lengths)
        places = torch.arange(max(counts.tolist(), default=0))
        returns = self.turn_rewards.values.new_zeros(len(counts), len(places))
        returns[on_device(places < counts[:, None], returns.device)] = self.turn_rewards.values
        return returns

    def take(self, rows: Tensor) -> Rollout:
        """The rows at `rows` `[K]` int64, in that order."""
        taken: Rollout = take_rows(self, type(self), rows)
        return taken

    def cut(self, at: Tensor) -> Rollout:
        """Rows with the first tokens of each response, which `generate` can continue. Shorter responses stay whole.

        A response that loses tokens is no longer finished, but cut. The texts are `NotSent`, since they belong to the
        whole responses.

        Args:
            at: `[B]` int64, how many tokens each response keeps at most, 0 or more.

        Raises:
            UserError: The rows are conversations, and their environments have read the tokens that would be cut.
        """
        if len(self.segments.values):
            raise UserError(
                "conversations cannot be cut by tokens, for an environment knows where they are; give turns"
            )
        device, before = self.response_ids.device, on_host(self.lengths)
        lengths = torch.minimum(on_host(at).clamp(min=0), before)
        lost = lengths < before  # [B]
        kept = torch.arange(self.response_ids.shape[1]) < lengths[:, None]  # [B, T]

        def shortened(column: Tensor) -> Tensor:
            beyond = ~kept.view(*kept.shape, *[1] * (column.dim() - 2))
            if column.is_floating_point():
                return column.masked_fill(on_device(beyond, device), 0)
            return on_device(on_host(column).masked_fill(beyond, 0), device)

        every = columns(type(self))
        per_token: dict[str, Any] = {
            each.name: shortened(each.of(self)) for each in every if each.kind is ColumnKind.TOKEN
        }
        per_token |= {each.name: each.of(self).shortened(before - lengths) for each in every if each.per_read_token}
        places = [(row == END).cumsum(0) - (row == END).int() for row in self.support.on_host().rows()]
        cut_off = [int((place >= length).sum()) for place, length in zip(places, lengths.tolist(), strict=True)]
        beyond = torch.tensor(cut_off, dtype=torch.int64)  # entries of each row's support
        texts: Any = NotSent("texts", "`cut` shortened the responses; generate from them, and read the texts of that")
        return replace(
            self,
            **per_token,
            **{name: getattr(self, name).shortened(beyond) for name in NOTED},
            lengths=on_device(lengths, device),
            finished=on_device(on_host(self.finished) & ~lost, device),
            inherited=on_device(torch.minimum(on_host(self.inherited), lengths), device),
            ended=on_device(on_host(self.ended).masked_fill(lost, Ending.TOKENS), device),
            texts=texts,
        )

    def concat(self, *others: Rollout) -> Rollout:
        """These rows, then those of the others, padded to the widest."""
        joined: Rollout = join_rows([self, *others], type(self))
        return joined

    def as_prompts(self, render: Callable[[str, dict[str, Any]], Sequence[int] | None]) -> Batch:
        """Prompts made from the responses, one from each row. Responses to these prompts are children of these rows.

        Args:
            render: Function that takes a response's text and its row of the dataset, and returns the token ids of the
                prompt, see `RLModule.tokens`. If it returns None, the row gets no prompt and so has no children.

        Raises:
            UserError: The texts are absent, since the type of the node's parameter does not ask for them.
        """
        device = self.response_ids.device
        rendered = [render(text, row) for text, row in zip(self.texts, self.rows, strict=True)]
        asked = [i for i, ids in enumerate(rendered) if ids is not None]
        written = Ragged.from_lists([ids for ids in rendered if ids is not None])
        prompts = Ragged(on_device(written.values, device), on_device(written.lengths, device))
        none = self.response_ids[: len(asked), :0]
        path = self.path if len(asked) == len(rendered) else self.path.take(torch.tensor(asked, dtype=torch.int64))
        rows = [self.rows[i] for i in asked]
        return Batch(prompts, none, none.bool(), torch.zeros_like(self.lengths[: len(asked)]), rows, path)


class RolloutWithTexts(Rollout):
    """A `Rollout` with its texts and its rows of the dataset: the type of a parameter whose node reads these."""


# The columns that models read with the tokens of their rows, by name.
MODEL_INPUTS = {each.name: each for each in (*columns(Batch), *columns(Rollout)) if each.model_input is not None}
