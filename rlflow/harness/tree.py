"""`rows_of`: the policy's turns in the calls of an episode, as rows in which each of its tokens is trained once.

A call reads some tokens, and the policy writes others after them. Where the tokens that a call reads begin with all of
an earlier call, it continues that call. So calls form trees, and each leaf is a row:

    reads 1 2, writes 3 4                        row 0: prompt 1 2, response 3 4 5 6 7, trained 3 4 and 7
    reads 1 2 3 4 5 6, writes 7
    reads 1 2 3 4 8, writes 9                    row 1: prompt 1 2, response 3 4 8 9, trained 9; 3 4 are inherited

The rows are a function of the calls alone. In which order these came does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class CallTokens:
    """The tokens of one call.

    Attributes:
        read: Token ids that the policy read.
        wrote: Token ids that it wrote after them.
        number: Number among the calls that read and ask for the same; distinguishes two that wrote the same.
        branch: The name that the agent gives to it.
        settings: Digest of its request's settings; calls with equal tokens and other settings are different calls.
    """

    read: Tokens
    wrote: Tokens
    number: int = 0
    branch: str = ""
    settings: str = ""

    @property
    def order(self) -> tuple[Tokens, int, str, str, int]:
        """Sort key of a call: a call comes after the call that it continues."""
        return self.whole, len(self.read), self.branch, self.settings, self.number

    @property
    def whole(self) -> Tokens:
        """All tokens, as a call reads them that continues this one."""
        return self.read + self.wrote


@dataclass(frozen=True)
class EpisodeRow:
    """A row of an episode.

    In the calls of the example at the top, numbered 0 to 2:

        field      row 0        row 1
        turns      0 1          0 2
        trained    True True    False True
        inherited  0            2, the tokens 3 4

    Attributes:
        turns: Numbers of the calls along the row, from its first; indices into the calls that `rows_of` was given.
        trained: Whether the tokens of each turn are trained in this row.
        inherited: Number of the first tokens after the prompt that are those of an earlier row.
    """

    turns: tuple[int, ...]
    trained: tuple[bool, ...]
    inherited: int


def rows_of(calls: Sequence[CallTokens]) -> list[EpisodeRow]:
    """Rows of an episode: one for each call that no other call continues; longest first, then in the order of tokens.

    Args:
        calls: The calls of an episode, in any order.

    Returns:
        Rows that do not depend on this order. A call is trained in the first of the rows that have it.
    """
    wholes = [call.whole for call in calls]
    parents = _parents(calls, wholes)
    inner = set(parents.values())
    leaves = [place for place in range(len(calls)) if place not in inner]
    leaves.sort(key=lambda place: (-len(wholes[place]), calls[place].order))
    rows: list[EpisodeRow] = []
    taken: set[int] = set()
    for leaf in leaves:
        turns = [leaf]
        while turns[0] in parents:
            turns.insert(0, parents[turns[0]])
        trained = tuple(turn not in taken for turn in turns)
        taken.update(turns)
        prompt = calls[turns[0]].read
        own = min(len(calls[turn].read) for turn, counts in zip(turns, trained, strict=True) if counts)
        alike = (
            _common(wholes[leaf], wholes[row.turns[-1]], own) for row in rows if calls[row.turns[0]].read == prompt
        )
        rows.append(EpisodeRow(tuple(turns), trained, max(0, max(alike, default=0) - len(prompt))))
    return rows


def _parents(calls: Sequence[CallTokens], wholes: Sequence[Tokens]) -> dict[int, int]:
    """The call that each call continues, by place: the longest whose tokens begin what it reads.

    Of calls whose tokens are the same, that is the first with the same branch, or else the first.
    """
    order = sorted(range(len(calls)), key=lambda place: calls[place].order)
    parents: dict[int, int] = {}
    before: list[list[int]] = []  # calls with the same tokens; they begin the next ones, which come later in this order
    for place in order:
        while before and wholes[place][: len(wholes[before[-1][0]])] != wholes[before[-1][0]]:
            before.pop()
        for alike in reversed(before):
            if len(wholes[alike[0]]) <= len(calls[place].read):
                of_branch = (other for other in alike if calls[other].branch == calls[place].branch)
                parents[place] = next(of_branch, alike[0])
                break
        if before and wholes[before[-1][0]] == wholes[place]:
            before[-1].append(place)
        else:
            before.append([place])
    return parents


def _common(one: Tokens, other: Tokens, most: int) -> int:
    """The number of tokens with which both begin, up to `most`."""
    low, high = 0, min(len(one), len(other), most)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
