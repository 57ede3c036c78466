"""Rows with common prefixes, of every kind that a run makes."""

from __future__ import annotations

import torch

from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged

Pair = tuple[list[int], list[int]]  # prompt and response


def rows_of(pairs: list[Pair]) -> TokenRows:
    """Rows of these prompts and responses."""
    return TokenRows.padded(*(Ragged.from_lists(list(lists)) for lists in zip(*pairs, strict=True)))


def forked_rows(vocabulary: int = 120, seed: int = 0) -> TokenRows:
    """22 rows: groups of one prompt, a tree, a row twice, a row that begins another, prompts within responses.

    Shuffled, so that rows which begin alike are apart; one has no response and one a single token.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(2, vocabulary, (count,), generator=generator).tolist()

    first, second = draw(20), draw(9)
    pairs: list[Pair] = [(first, draw(count)) for count in (5, 12, 1, 30)]
    pairs += [(second, draw(count)) for count in (4, 17, 8)]
    for _ in range(2):  # a tree: two trunks, of each two branches, of each two leaves
        trunk = draw(11)
        for _ in range(2):
            branch = trunk + draw(9)
            pairs += [(second, branch + draw(6)) for _ in range(2)]
    pairs += [pairs[1], (first, pairs[3][1][:14]), (first + pairs[3][1][:10], draw(7))]
    pairs += [(first, []), (first[:7], draw(9)), (draw(3), draw(3))]
    order = torch.randperm(len(pairs), generator=generator).tolist()
    return rows_of([pairs[place] for place in order])


def rows_alike(prompt: int, response: int, samples: int) -> TokenRows:
    """Samples of as many tokens to one prompt."""
    tokens = torch.randint(2, 120, (samples + 1, max(prompt, response)), generator=torch.Generator().manual_seed(0))
    first, *others = tokens.tolist()
    return rows_of([(first[:prompt], other[:response]) for other in others])
