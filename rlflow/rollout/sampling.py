"""From prompts to a `Rollout`: what an engine is asked, and how its completions become rows. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlflow.data.batch import Batch, Pairs, Rollout
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling, sampling_seed


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
    """
    prompts = [row.tolist() for row in batch.prompt_ids.rows() for _ in range(n)]
    seeds = [sampling_seed(seed, draw, node, prompt, index) for prompt in ids for index in range(n)]
    completions = engine.generate(prompts, seeds, sampling, version)
    every_n = torch.arange(len(batch.prompt_ids)).repeat_interleave(n)
    response_ids, logprobs, lengths = _pad(completions, dtype)
    mask = torch.arange(response_ids.shape[1])[None, :] < lengths[:, None]  # [B * n, T]
    return Rollout(
        prompt_ids=batch.prompt_ids.take(every_n),
        response_ids=response_ids,
        loss_mask=mask,
        lengths=lengths,
        logprobs=logprobs,
        finished=torch.tensor([completion.finished for completion in completions], dtype=torch.bool),
        group=torch.tensor(list(ids), dtype=torch.int64).repeat_interleave(n),
        version=torch.full((len(prompts),), version, dtype=torch.int64),
        texts=[decode(completion.token_ids) for completion in completions],
        rows=[batch.rows[i] for i in every_n.tolist()],
    )


def _pad(completions: Sequence[Completion], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Response ids `[B, T]`, logprobs `[B, T]` and lengths `[B]`, right-padded with 0."""
    lengths = [len(completion.token_ids) for completion in completions]
    response_ids = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64)
    logprobs = torch.zeros(response_ids.shape, dtype=dtype)
    for row, (completion, length) in enumerate(zip(completions, lengths, strict=True)):
        response_ids[row, :length] = torch.tensor(completion.token_ids, dtype=torch.int64)
        logprobs[row, :length] = torch.tensor(completion.logprobs, dtype=dtype)
    return response_ids, logprobs, torch.tensor(lengths, dtype=torch.int64)
