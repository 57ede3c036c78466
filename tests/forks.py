"""Rows that begin alike in every way that a run brings about, and float64 that stays float64 in transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

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


@contextmanager
def wide_casts() -> Iterator[None]:
    """Within it, float64 stays float64 where transformers' norms, rotary embeddings and routers cast to float32.

    Sums of gradients are then rounded nowhere, so the order in which they are taken does not show at 1e-10.
    """
    to, narrow, typed, softmax = Tensor.to, Tensor.float, Tensor.type, torch.nn.functional.softmax

    def widens(value: Tensor) -> bool:
        caller = sys._getframe(2).f_globals["__name__"]
        return value.dtype == torch.float64 and caller.startswith("transformers.")

    def wide(given: Any) -> Any:
        return torch.float64 if given is torch.float32 else given

    def to_wide(self: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if widens(self):
            args, keywords = tuple(map(wide, args)), {name: wide(given) for name, given in keywords.items()}
        return to(self, *args, **keywords)

    def float_wide(self: Tensor) -> Tensor:
        return self if widens(self) else narrow(self)

    def type_wide(self: Tensor, *args: Any, **keywords: Any) -> Any:
        return typed(self, *(map(wide, args) if widens(self) else args), **keywords)

    def softmax_wide(input: Tensor, *args: Any, **keywords: Any) -> Tensor:
        if widens(input):
            keywords = {name: wide(given) for name, given in keywords.items()}
        return softmax(input, *args, **keywords)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "to", to_wide)
        patched.setattr(Tensor, "float", float_wide)
        patched.setattr(Tensor, "type", type_wide)
        patched.setattr(torch.nn.functional, "softmax", softmax_wide)
        yield
