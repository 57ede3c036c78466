"""Sampled responses.

`B` is the number of rows on this rank, `T` the longest response among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from rlflow.values.cuts import Cut, Home, PerSample, PerToken
from rlflow.values.ragged import Ragged


@dataclass(frozen=True)
class Rollout:
    """Sampled responses, `n` consecutive rows for each prompt.

    Attributes:
        prompt_ids: Token ids of each sample's prompt.
        response_ids: `[B, T]` int64, right-padded.
        loss_mask: `[B, T]` bool, True on generated tokens, the end-of-sequence token included.
        lengths: `[B]` int64, generated tokens of each row.
        logprobs: `[B, T]` float32, the engine's, of the policy version that generated each token, after temperature.
        finished: `[B]` bool, False where the response was cut at the longest allowed length.
        group: `[B]` int64, global id of the prompt that the sample answers.
        version: `[B]` int64, of the policy that generated the sample; of its oldest token where several did.
        versions: `[B, T]` int32, of the policy that generated each token.
        experts: The experts that the engine chose for each token that it read, `[sum, layers, k]` uint8 (int16 beyond
            256 experts): of a row its prompt and its response but for the last token, likeliest first. Without entries
            where no model replays them.
        texts: The decoded responses, special tokens left out.
        rows: The dataset's row of each sample.
    """

    prompt_ids: Ragged
    response_ids: PerToken
    loss_mask: PerToken
    lengths: PerSample
    logprobs: PerToken
    finished: PerSample
    group: PerSample
    version: PerSample
    versions: PerToken
    experts: Ragged
    texts: Annotated[list[str], Cut.JSON, Home]
    rows: Annotated[list[dict[str, Any]], Cut.JSON, Home]
