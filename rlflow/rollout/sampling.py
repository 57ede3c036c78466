"""From prompts to a `Rollout`: what an engine is asked, and how its completions become rows. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlflow.errors import UserError
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling
from rlflow.values.batch import Batch, Pairs
from rlflow.values.columns import join_rows, to_device
from rlflow.values.cuts import PerSample, PerToken
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.path import RowPath, hashed
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending, Rollout


def sample(
    engine: RolloutEngine,
    rows: Batch | Pairs | Rollout,
    parents: RowPath,
    n: int,
    sampling: Sampling,
    *,
    seed: int,
    draw: int,
    node: str,
    version: int,
    decode: Callable[[Sequence[int]], str],
    dtype: torch.dtype = torch.float32,
    part: Part | None = None,
    earlier: Earlier | None = None,
    longest: int | None = None,
    longest_prompt: int | None = None,
) -> Rollout:
    """`n` responses to each prompt with the policy `version`, in consecutive rows; or `n` continuations of each row.

    A row that has ended, or is `longest` already, has one continuation, its copy. Every continuation has the loss mask
    of what it inherits: which of them is trained on it is decided when it is known which a node returns.

    Args:
        engine: Holds the weights of `version`, or refuses.
        rows: Prompts, or responses to continue, `B` rows.
        parents: The path of each.
        n: Responses to each prompt, or continuations of each response.
        sampling: Length, temperature and stop tokens.
        seed: Seed of the run. A sample's own seed is a function of (seed, draw, node, path, call).
        draw: How often prompts were drawn before.
        node: The node that samples.
        version: The policy version that must generate.
        decode: Token ids to text.
        dtype: Dtype of the logprobs.
        part: Where responses may be cut off: the rows are then as far as they got, see `under_way`.
        earlier: What the node made of each row before; nothing where None.
        longest: Tokens of the longest continued response, what it had included; of a prompt `sampling` says it.
        longest_prompt: Tokens of the longest prompt, for which memory is planned; None for any.

    Raises:
        UserError: A prompt is longer.
    """
    bring_over([rows.prompt_ids.values, rows.prompt_ids.lengths])
    prompt_ids = rows.prompt_ids.on_host()
    _require_short(prompt_ids, longest_prompt, node)
    counts = torch.full((len(parents),), n)
    if isinstance(rows, Rollout):
        counts[~on_host(under_way(rows, longest))] = 1
    children = Children.of(parents, counts, node, earlier)
    parent, path, seeds = children.parent, children.path, children.seeds(seed, draw)
    if isinstance(rows, Rollout):
        begun = Responses.of(rows, parent, dtype)
    elif part is not None and part.begun is not None:
        begun = Responses.after(part.begun, path)
    else:
        begun = Responses.new(len(parent), dtype)
    room = begun.room(longest if isinstance(rows, Rollout) and longest is not None else sampling.max_tokens)
    limits = room.clamp(max=sampling.max_tokens if part is None else part.max_tokens)
    every_prompt = prompt_ids.take(parent)
    prompts = [tokens.tolist() for tokens in every_prompt.rows()]
    completions: dict[int, Completion] = {}
    for some in _together(limits, at_once=isinstance(rows, Rollout)):
        asked = [prompts[row] + begun.tokens(row) for row in some]
        of_each = tuple(limits[some].tolist())
        how = replace(sampling, max_tokens=max(of_each), limits=of_each if len({*of_each}) > 1 else None)
        made = engine.generate(asked, [seeds[row] for row in some], how, version)
        completions |= zip(some, made, strict=True)
    responses = begun.extended(completions, version)
    places = torch.arange(responses.response_ids.shape[1])  # [T]
    mask = places < responses.lengths[:, None]  # [B * n, T]
    inherited, experts = torch.zeros_like(responses.lengths), _experts(completions, len(parent))
    if isinstance(rows, Rollout):
        inherited = begun.lengths
        had = pad(on_host(rows.loss_mask), (0, len(places) - rows.loss_mask.shape[1]))[parent]
        mask &= had | (places >= inherited[:, None])
        experts = _with_inherited(to_device(rows.experts, mask.device).take(parent), experts)
    none = torch.zeros(0, dtype=torch.int64)
    return Rollout(
        prompt_ids=every_prompt,
        response_ids=responses.response_ids,
        loss_mask=mask,
        lengths=responses.lengths,
        logprobs=responses.logprobs,
        finished=responses.finished,
        path=path,
        # Versions only grow; without rows, none.
        version=responses.versions[:, 0].long() if prompts else responses.lengths,
        versions=responses.versions,
        inherited=inherited,
        experts=experts,
        segments=Ragged(none, torch.zeros_like(responses.lengths)),
        turn_rewards=Ragged(none.to(dtype), torch.zeros_like(responses.lengths)),
        ended=torch.where(responses.finished, Ending.DONE, Ending.TOKENS),
        seat=torch.zeros_like(responses.lengths),
        texts=[decode(responses.tokens(row)) for row in range(len(prompts))],
        messages=[[] for _ in prompts],
        rows=[rows.rows[i] for i in parent.tolist()],
        progress=[{} for _ in prompts],
    )


def _require_short(prompts: Ragged, longest: int | None, node: str) -> None:
    found = max(prompts.lengths.tolist(), default=0)
    if longest is not None and found > longest:
        raise UserError(
            f"node `{node}` generates from a prompt of {found} tokens, and `data.max_prompt_length` is {longest}, for"
            " which memory is planned; raise it, or write shorter prompts"
        )


def _together(limits: Tensor, at_once: bool) -> list[list[int]]:
    """The rows that may grow by at least a token, by calls of the engine.

    Args:
        limits: `[B]` int64, by how many tokens each may grow.
        at_once: Whether one call has them all; else each has those of one limit, as parts of responses always had.
    """
    if at_once:
        growing: list[int] = limits.nonzero()[:, 0].tolist()
        return [growing] if growing else []
    each = sorted({*limits.tolist()} - {0}, reverse=True)
    return [(limits == limit).nonzero()[:, 0].tolist() for limit in each]


def _experts(completions: Mapping[int, Completion], rows: int) -> Ragged:
    """The experts of each row that was generated; without entries where the engine was not asked to tell them."""
    routed = {row: of_row.experts for row, of_row in completions.items() if of_row.experts is not None}
    if not routed:
        return Ragged(torch.zeros(0, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64))
    lengths = torch.tensor([len(routed[row]) if row in routed else 0 for row in range(rows)])
    assert len(routed) == len(completions), "an engine gives experts of all or of none"
    return Ragged(torch.from_numpy(np.concatenate([routed[row] for row in sorted(routed)])), lengths)


def _with_inherited(parents: Ragged, routed: Ragged) -> Ragged:
    """The experts that each row's parent had for its tokens, then those of the tokens that came to it."""
    if not len(parents.values):
        return routed
    pairs = zip(parents.rows(), routed.rows(), strict=True)
    of_rows = [torch.cat([had, new[len(had) :]]) if len(new) else had for had, new in pairs]
    return Ragged(torch.cat(of_rows), torch.tensor([len(row) for row in of_rows]))


@dataclass(frozen=True)
class Part:
    """How far responses get at once, where long ones are cut off and continued later.

    Attributes:
        max_tokens: Tokens by which a response grows at most.
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
        """`count` responses without a token, with logprobs of this dtype."""
        none = torch.zeros(count, 0, dtype=torch.int64)
        return cls(none, none.to(dtype), none.int(), none.sum(dim=1), none.sum(dim=1).bool())

    @classmethod
    def after(cls, begun: Rollout, path: RowPath) -> Responses:
        """The responses of `begun`, then new ones.

        Args:
            begun: The first of them, as far as they got.
            path: Path of all `B`.

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
        """The responses at `rows` `[K]` of `rollout`, to be continued, with logprobs of this dtype."""
        there = to_device(rollout, torch.device("cpu")).take(rows)
        return cls(there.response_ids, there.logprobs.to(dtype), there.versions, there.lengths, there.finished)

    def room(self, max_tokens: int) -> Tensor:
        """`[B]` int64, by how many tokens each may grow to be `max_tokens` long; 0 where it has ended."""
        left: Tensor = (max_tokens - self.lengths).clamp(min=0).masked_fill(self.finished, 0)
        return left

    def tokens(self, row: int) -> list[int]:
        """The tokens of one response."""
        tokens: list[int] = self.response_ids[row, : self.lengths[row]].tolist()
        return tokens

    def extended(self, completions: Mapping[int, Completion], version: int) -> Responses:
        """The responses with what `version` generated, by row, after them."""
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
    """Refuse to continue responses with another number of responses to a prompt.

    Args:
        begun: Path of those that were cut off.
        path: Path of all that are asked for, which begin with those.

    Raises:
        UserError: They were begun with other numbers.
    """
    if not torch.equal(begun.numbers, path.numbers[: len(begun)]):
        n, before = (int((of.root == path.root[0]).sum()) for of in (path, begun))
        raise UserError(
            f"{before} responses to a prompt were cut off and are to go on, and {n} are asked for; continue with the"
            " same `group_size`"
        )


def under_way(rollout: Rollout, longest: int | None) -> Tensor:
    """`[B]` bool, which responses have not ended and may grow to `longest` tokens; to any number where that is None."""
    left: Tensor = ~rollout.finished
    return left if longest is None else left & (rollout.lengths < longest)


@dataclass(frozen=True)
class Earlier:
    """What a node made of each of `B` rows before, in the same run of it.

    Attributes:
        calls: `[B]` int64, how often it generated from the row.
        children: `[B]` int64, how many rows came of it.
    """

    calls: Tensor
    children: Tensor

    @classmethod
    def none(cls, rows: int) -> Earlier:
        """Nothing yet."""
        zeros = torch.zeros(rows, dtype=torch.int64)
        return cls(zeros, zeros)


@dataclass(frozen=True)
class Children:
    """`K` rows that come of others, those of one parent in consecutive rows.

    Attributes:
        path: Path of each.
        parent: `[K]` int64, the row that each comes of.
        number: `[K]` int64, of each among those of its parent in this call.
        call: `[K]` int64, how often the node generated from its parent before.
    """

    path: RowPath
    parent: Tensor
    number: Tensor
    call: Tensor

    @classmethod
    def of(cls, parents: RowPath, counts: Tensor, node: str, earlier: Earlier | None = None) -> Children:
        """So many of each row.

        Args:
            parents: The path of each of `B` rows.
            counts: `[B]` int64.
            node: Which makes them.
            earlier: What it made of each row before; nothing where None.
        """
        earlier = earlier or Earlier.none(len(parents))
        parent = torch.arange(len(parents)).repeat_interleave(counts)
        path = parents.children(counts, node, earlier.children)
        return cls(path, parent, path.index - earlier.children[parent], earlier.calls[parent])

    def seeds(self, run_seed: int, draw: int, turn: int = 0) -> list[int]:
        """`K` seeds, see `sampling_seed`."""
        return [self.seed(row, run_seed, draw, turn) for row in range(len(self.path))]

    def seed(self, row: int, run_seed: int, draw: int, turn: int = 0, seat: str = "") -> int:
        """The seed of one row, or of a seat of the game that begins with this row."""
        above = self.path.numbers[row, :-1].tolist()
        node = self.path.levels[-1] + (f"/{seat}" if seat else "")
        return sampling_seed(run_seed, draw, node, above, int(self.number[row]), int(self.call[row]), turn)


def sampling_seed(
    run_seed: int, draw: int, node: str, parent: Sequence[int], child: int, call: int = 0, turn: int = 0
) -> int:
    """The seed of one response, 63 bits: the same whatever the ranks, and other for every other argument.

    Args:
        run_seed: Seed of the run.
        draw: How often prompts were drawn before.
        node: The node that samples.
        parent: The path of the row that is answered or continued; of a prompt its id.
        child: The number of the response among those to it.
        call: How often this parent was generated from before, in this node and draw; a number of the row's, not of the
            rank's calls.
        turn: Turn of the response, from 0.
    """
    where = node + (f"#{call}" if call else "") + (f"@{turn}" if turn else "")
    key = f"{run_seed}/{draw}/{'.'.join(map(str, parent))}/{child}/{where}"
    return hashed(key) >> 1


def without_truncated(rollout: Rollout) -> Rollout:
    """The same responses; those that were cut keep only inherited tokens in the loss mask, which were not cut."""
    kept = rollout.finished[:, None] | rollout.inherited_mask
    return replace(rollout, loss_mask=rollout.loss_mask & kept)


def to_be_continued(rollout: Rollout, longest: int) -> Rollout:
    """The same responses; those that may grow to `longest` tokens have their own tokens back in the loss mask.

    They were cut to be continued, and not by that length.
    """
    places = torch.arange(rollout.loss_mask.shape[1], device=rollout.loss_mask.device)
    own = (places < rollout.lengths[:, None]) & ~rollout.inherited_mask
    return replace(rollout, loss_mask=rollout.loss_mask | (own & under_way(rollout, longest)[:, None]))
