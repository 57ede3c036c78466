"""Calls of an episode as rows: each token that the policy wrote is trained in one place, in any order of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlflow.harness.tree import CallTokens, EpisodeRow, rows_of

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@st.composite
def trees(draw: st.DrawFn) -> list[CallTokens]:
    """Calls that begin anew, continue another call, or repeat one; few tokens, so that many begin alike by chance."""
    calls: list[CallTokens] = []
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["anew", "continues", "repeats", "cuts"])) if calls else "anew"
        other = draw(st.sampled_from(calls)) if calls else None
        if other is None or kind == "anew":
            read = draw(TOKENS)
        elif kind == "continues":
            read = other.whole + draw(TOKENS)
        elif kind == "repeats":
            read = other.read
        else:
            read = other.whole[: draw(st.integers(1, len(other.whole)))] + draw(TOKENS)
        calls.append(CallTokens(read, draw(TOKENS), counts.get(read, 0)))
        counts[read] = counts.get(read, 0) + 1
    return calls


def whole(calls: list[CallTokens], row: EpisodeRow) -> tuple[int, ...]:
    return calls[row.turns[-1]].whole


def test_a_fork_is_a_row_that_inherits_what_it_shares() -> None:
    """The example of `rlflow.harness.tree`."""
    calls = [CallTokens((1, 2), (3, 4)), CallTokens((1, 2, 3, 4, 5, 6), (7,)), CallTokens((1, 2, 3, 4, 8), (9,))]
    assert rows_of(calls) == [EpisodeRow((0, 1), (True, True), 0), EpisodeRow((0, 2), (False, True), 2)]


def test_a_request_that_rewrites_its_messages_has_a_prompt_of_its_own() -> None:
    calls = [CallTokens((1, 2), (3, 4)), CallTokens((1, 2, 3, 5), (6,))]
    assert rows_of(calls) == [EpisodeRow((1,), (True,), 0), EpisodeRow((0,), (True,), 0)]


def test_equal_answers_to_equal_calls_are_trained_both_and_the_first_is_continued() -> None:
    calls = [CallTokens((1,), (2,), 1), CallTokens((1,), (2,), 0), CallTokens((1, 2, 3), (4,))]
    assert rows_of(calls) == [EpisodeRow((1, 2), (True, True), 0), EpisodeRow((0,), (True,), 0)]


def test_of_equal_answers_the_one_of_its_own_branch_is_continued() -> None:
    branches = ("left", "right")
    calls = [CallTokens((1,), (2,), branch=each) for each in branches]
    for last in branches:
        row, other = rows_of([*calls, CallTokens((1, 2, 3), (4,), branch=last)])
        assert [row.turns, other.turns] == [(branches.index(last), 2), (1 - branches.index(last),)]


@given(trees())
def test_each_written_token_is_trained_in_exactly_one_row(calls: list[CallTokens]) -> None:
    rows = rows_of(calls)
    trained = [turn for row in rows for turn, counts in zip(row.turns, row.trained, strict=True) if counts]
    assert sorted(trained) == list(range(len(calls)))
    for row in rows:
        tokens = whole(calls, row)
        assert row.trained[-1]
        for turn in row.turns:  # each turn of a row stands in it, token for token
            assert tokens[: len(calls[turn].whole)] == calls[turn].whole


@given(trees())
def test_inherited_tokens_are_those_of_an_earlier_row_and_none_of_them_is_trained(calls: list[CallTokens]) -> None:
    rows = rows_of(calls)
    for number, row in enumerate(rows):
        prompt = calls[row.turns[0]].read
        end = len(prompt) + row.inherited
        own = [len(calls[turn].read) for turn, counts in zip(row.turns, row.trained, strict=True) if counts]
        other = [len(calls[turn].whole) for turn, counts in zip(row.turns, row.trained, strict=True) if not counts]
        assert max([0, *other]) <= end <= min(own) or (not other and row.inherited == 0)
        assert not row.inherited or any(
            calls[earlier.turns[0]].read == prompt and whole(calls, earlier)[:end] == whole(calls, row)[:end]
            for earlier in rows[:number]
        )


@given(trees(), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_of_calls(calls: list[CallTokens], draws: object) -> None:
    shuffled = list(calls)
    draws.shuffle(shuffled)  # type: ignore[attr-defined]

    def spelled(of: list[CallTokens]) -> list[tuple[object, ...]]:
        return [
            (tuple((of[turn].read, of[turn].wrote) for turn in row.turns), row.trained, row.inherited)
            for row in rows_of(of)
        ]

    assert spelled(shuffled) == spelled(calls)
