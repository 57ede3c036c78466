"""From prompts to a `Rollout`: what an engine is asked, and how its completions become rows. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from rlflow.rollout.engine import Completion, RolloutEngine, Sampling, sampling_seed
from rlflow.rollout.responses import Part, Responses
from rlflow.values.batch import Batch, Pairs
from rlflow.values.host_copy import bring_over, on_host
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout


def sample(
    engine: RolloutEngine,
    batch: Batch | Pairs,
    ids: Sequence[int],
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
) -> Rollout:
    """`n` responses to each prompt of `batch` with the policy `version`, in consecutive rows.

    Args:
        engine: Holds the weights of `version`, or refuses.
        batch: Prompts, `B` rows.
        ids: Global id of each prompt; the samples' `group`.
        n: Responses to each prompt.
        sampling: Length, temperature and stop tokens.
        seed: Of the run. A sample's own seed is a function of (seed, draw, node, prompt id, sample index).
        draw: How often prompts were drawn before.
        node: The node that samples.
        version: The policy version that must generate.
        decode: Token ids to text.
        dtype: Of the logprobs.
        part: Where responses may be cut off: the rows are then as far as they got, see `under_way`.
    """
    bring_over([batch.prompt_ids.values, batch.prompt_ids.lengths])
    prompt_ids = Ragged(on_host(batch.prompt_ids.values), on_host(batch.prompt_ids.lengths))
    prompts = [row for tokens in prompt_ids.rows() for row in [tokens.tolist()] * n]
    seeds = [sampling_seed(seed, draw, node, prompt, index) for prompt in ids for index in range(n)]
    begun = None if part is None else part.begun
    groups = torch.tensor(list(ids), dtype=torch.int64).repeat_interleave(n)
    responses = Responses.new(len(prompts), dtype) if begun is None else Responses.after(begun, groups)
    room = responses.room(sampling.max_tokens)
    limits = room if part is None else room.clamp(max=part.max_tokens)
    completions: dict[int, Completion] = {}
    for limit in sorted({*limits.tolist()} - {0}, reverse=True):  # one, but for last parts that are shorter
        rows = (limits == limit).nonzero()[:, 0].tolist()
        asked = [prompts[row] + responses.tokens(row) for row in rows]
        made = engine.generate(asked, [seeds[row] for row in rows], replace(sampling, max_tokens=limit), version)
        completions |= zip(rows, made, strict=True)
    responses = responses.extended(completions, version)
    every_n = torch.arange(len(prompt_ids)).repeat_interleave(n)
    oldest = responses.versions[:, 0].long() if prompts else responses.lengths  # versions only grow; without rows, none
    return Rollout(
        prompt_ids=prompt_ids.take(every_n),
        response_ids=responses.response_ids,
        loss_mask=torch.arange(responses.response_ids.shape[1])[None, :] < responses.lengths[:, None],  # [B * n, T]
        lengths=responses.lengths,
        logprobs=responses.logprobs,
        finished=responses.finished,
        group=groups,
        version=oldest,
        versions=responses.versions,
        experts=_experts([completions[row] for row in range(len(prompts)) if row in completions], len(prompts)),
        texts=[decode(responses.tokens(row)) for row in range(len(prompts))],
        rows=[batch.rows[i] for i in every_n.tolist()],
    )


def _experts(completions: Sequence[Completion], rows: int) -> Ragged:
    """The `experts` of a `Rollout`; without entries where the engine was not asked to tell them."""
    told = [completion.experts for completion in completions if completion.experts is not None]
    if not told:
        return Ragged(torch.zeros(0, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64))
    assert len(told) == rows, "a response that goes on has experts of its last part only"
    return Ragged(torch.from_numpy(np.concatenate(told)), torch.tensor([len(of_row) for of_row in told]))
