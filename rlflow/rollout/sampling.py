"""From prompts to a `Rollout`: what an engine is asked, and how its completions become rows. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlflow.errors import UserError
from rlflow.rollout.children import Children, Earlier
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling
from rlflow.rollout.responses import Part, Responses
from rlflow.values.batch import Batch, Pairs
from rlflow.values.columns import to_device
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.path import RowPath
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
        seed: Of the run. A sample's own seed is a function of (seed, draw, node, path, call).
        draw: How often prompts were drawn before.
        node: The node that samples.
        version: The policy version that must generate.
        decode: Token ids to text.
        dtype: Of the logprobs.
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
        counts[~_goes_on(rows, longest)] = 1
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


def _goes_on(rows: Rollout, longest: int | None) -> Tensor:
    """`[B]` bool, which responses have not ended."""
    left = ~on_host(rows.finished)
    return left if longest is None else left & (on_host(rows.lengths) < longest)


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
