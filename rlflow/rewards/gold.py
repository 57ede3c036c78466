"""Gold answers are scored before the first step: the answer that a row gives as right must get the best reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rlflow.errors import UserError, readable_line
from rlflow.rewards.by_dataset import ByDataset
from rlflow.rewards.reward import BEST_REWARD, Reward, RewardInput, scored
from rlflow.rewards.weighted_sum import WeightedSum

TOLERANCE = 1e-6  # of a score that a task's own scorer computes
LETTERS = 120  # shown of a gold answer


def check_gold(
    reward: Reward,
    rows: Sequence[dict[str, Any]],
    places: Sequence[str],
    prompt_column: str | None,
    tokens: Callable[[str], list[int]],
) -> int:
    """Score the gold answers of rows; returns the number of gold answers in rows that their reward applies to.

    Each part of a sum that knows gold answers is asked by itself. A policy that answers like the dataset could not be
    rewarded where such an answer is not: the answer's column, its form, or the reward is wrong.

    Args:
        reward: The module's reward.
        rows: Some rows of the dataset.
        places: The place of each, for the error.
        prompt_column: Column of the prompt, see `RewardInput`.
        tokens: Converts a text to token ids.

    Raises:
        UserError: A gold answer gets less than `BEST_REWARD`; the first such answer is shown.
    """
    looked_at = 0
    found: dict[Reward, list[tuple[dict[str, Any], str, str]]] = {}
    for row, place in zip(rows, places, strict=True):
        for part in _parts(reward, row):
            if text := part.gold_of(row):
                found.setdefault(part, []).append((row, place, text))
    for part, known in found.items():
        texts = [text for _, _, text in known]
        ids = [tokens(text) for text in texts]
        read = RewardInput(texts, [row for row, _, _ in known], prompt_column, token_ids=partial(list, ids))
        found_scores = scored(part, read)
        scores, applies = found_scores.total, [i for i in range(len(texts)) if i not in found_scores.absent]
        wrong = [i for i in applies if scores[i] < BEST_REWARD - TOLERANCE]
        if wrong:
            first = wrong[0]
            raise UserError(
                f"{part} gives {len(wrong)} of {len(applies)} gold answers less than {BEST_REWARD:g}, so no response to"
                f" these rows could be right: {scores[first]:g} for '{readable_line(texts[first]):.{LETTERS}}'"
                f" ({known[first][1]}); correct the answers, name another column, or correct the reward"
            )
        looked_at += len(applies)
    return looked_at


def _parts(reward: Reward, row: dict[str, Any]) -> Iterator[Reward]:
    """The rewards that score a row's responses by themselves: the parts of a sum, for the row's dataset."""
    if isinstance(reward, ByDataset):
        yield from _parts(reward.of(row), row)
    elif isinstance(reward, WeightedSum):
        for part in reward.parts.values():
            yield from _parts(part, row)
    else:
        yield reward
