"""Global batches are the same for any number of shards, every row is dealt once, and a rank reads its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.data.loader import Loader, share, spread
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.models.tiny import tiny_tokenizer
from rlflow.values.batch import Pairs
from tests.data.list_source import Listed

TOKENIZER = tiny_tokenizer()  # one token a character; 0 ends a text


def numbered(count: int) -> list[dict[str, Any]]:
    """Rows whose prompt and answer are their number."""
    return [{"question": str(row), "answer": str(row)} for row in range(count)]


def loader(rows: list[dict[str, Any]], seed: int = 0, **settings: Any) -> Loader:
    source = Listed(rows)
    return Loader(source, PromptData(source, **settings).resolved(), TOKENIZER, seed)


def dealt(of: Loader, step: int, shards: int) -> list[int]:
    """The numbers of the rows of a step, shard after shard."""
    return [int(row["question"]) for shard in range(shards) for row in of.batch(step, shard, shards)[0].rows]


@given(
    rows=st.integers(1, 40),
    prompts=st.integers(1, 12),
    shards=st.integers(1, 5),
    step=st.integers(0, 20),
    seed=st.integers(0, 2**40),
)
def test_a_step_has_the_same_rows_in_the_same_order_for_any_number_of_shards(
    rows: int, prompts: int, shards: int, step: int, seed: int
) -> None:
    data = loader(numbered(rows), seed, prompts_per_step=min(prompts, rows))

    assert dealt(data, step, shards) == dealt(data, step, 1)
    ids = torch.cat([data.batch(step, shard, shards)[1] for shard in range(shards)])
    assert ids.tolist() == [step * min(prompts, rows) + place for place in range(min(prompts, rows))]


def test_an_epoch_draws_every_row_once_and_leaves_out_what_fills_no_step() -> None:
    data = loader(numbered(10), prompts_per_step=3)  # 3 steps of 3; 1 row waits
    epoch = [number for step in range(3) for number in dealt(data, step, 2)]

    assert data.steps_per_epoch == 3
    assert len(epoch) == len(set(epoch)) == 9


def test_epochs_have_different_orders_that_the_seed_decides() -> None:
    first, again, other = (loader(numbered(64), seed, prompts_per_step=64) for seed in (1, 1, 2))

    assert dealt(first, 0, 1) == dealt(again, 0, 1)
    assert len({tuple(dealt(data, epoch, 1)) for data in (first, other) for epoch in (0, 1)}) == 4


def test_a_run_continues_at_any_step() -> None:
    straight, continued = (loader(numbered(10), prompts_per_step=4) for _ in range(2))
    steps = [dealt(straight, step, 1) for step in range(7)]

    assert dealt(continued, 6, 1) == steps[6]


def test_the_order_is_that_of_the_source_without_shuffle() -> None:
    data = loader(numbered(6), prompts_per_step=3, shuffle=False)

    assert [dealt(data, step, 1) for step in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_shard_reads_its_own_rows_and_no_other() -> None:
    source = Listed(numbered(12))
    data = Loader(source, PromptData(source, prompts_per_step=6).resolved(), TOKENIZER, seed=0)
    source.reads.clear()  # the scan's

    batch, _ = data.batch(1, shard=1, shards=3)
    assert source.reads == [int(row["question"]) for row in batch.rows]
    assert len(source.reads) == 2


def test_shares_differ_by_at_most_one_and_may_be_empty() -> None:
    assert [len(share(10, shard, 4)) for shard in range(4)] == [2, 3, 2, 3]
    assert [len(share(2, shard, 4)) for shard in range(4)] == [0, 1, 0, 1]


def test_a_shard_without_rows_has_an_empty_batch() -> None:
    batch, ids = loader(numbered(2), prompts_per_step=2, response="answer").batch(0, shard=0, shards=4)

    assert (len(batch.prompt_ids), tuple(batch.response_ids.shape), batch.rows, ids.tolist()) == (0, (0, 0), [], [])
    assert batch.prompt_ids.values.dtype == batch.response_ids.dtype == ids.dtype == torch.int64


def test_a_batch_is_right_padded_and_masks_the_responses() -> None:
    rows = [{"question": "ab", "answer": "xyz"}, {"question": "c", "answer": ""}]
    batch, _ = loader(rows, prompts_per_step=2, shuffle=False, response="answer").batch(0, 0, 1)

    pad = TOKENIZER.pad_token_id
    assert [ids.tolist() for ids in batch.prompt_ids.rows()] == [[97, 98], [99]]
    assert batch.response_ids.tolist() == [[120, 121, 122, 0], [0, pad, pad, pad]]
    assert batch.lengths.tolist() == [4, 1]
    assert batch.loss_mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.rows == rows


def test_of_a_conversation_the_turns_of_the_policy_are_trained_on() -> None:
    roles = ("user", "assistant", "user", "assistant")
    rows = [{"m": [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]}] * 2
    rows[1] = {"m": rows[0]["m"][:2]}
    batch, _ = loader(rows, prompts_per_step=2, shuffle=False, response="m", chat_template=True).batch(0, 0, 1)

    assert [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch.response_ids, batch.loss_mask, strict=True)] == [
        "b<|im_end|>d<|im_end|>",
        "b<|im_end|>",
    ]


def test_prompts_without_responses_have_none() -> None:
    batch, _ = loader(numbered(2), prompts_per_step=2).batch(0, 0, 1)

    assert tuple(batch.response_ids.shape) == tuple(batch.loss_mask.shape) == (2, 0)
    assert batch.lengths.tolist() == [0, 0]


def test_validation_has_all_rows_in_the_order_of_the_source_whatever_the_step_draws() -> None:
    data = loader(numbered(5), prompts_per_step=100)
    parts = [data.all(shard, 3) for shard in range(3)]

    assert [row["question"] for batch, _ in parts for row in batch.rows] == ["0", "1", "2", "3", "4"]
    assert torch.cat([ids for _, ids in parts]).tolist() == [0, 1, 2, 3, 4]


def test_rows_that_are_too_long_are_dropped_before_any_is_dealt_out() -> None:
    lengths = [1, 9, 2, 8, 3, 7]
    data = loader(
        [{"question": "x" * length} for length in lengths],
        prompts_per_step=3,
        max_prompt_length=3,
        overlong_rows="drop",
    )

    assert sorted(len(row["question"]) for row in data.batch(0, 0, 1)[0].rows) == [1, 2, 3]
    assert str(data.scan) == "listed: 3 of 6 rows kept; 3 too long, such as listed, row 1, listed, row 3, listed, row 5"


def test_a_prompt_of_just_the_limit_is_kept() -> None:
    data = loader([{"question": "abc"}], prompts_per_step=1, max_prompt_length=3)

    assert str(data.scan) == "listed: 1 of 1 rows kept"


def test_a_prompt_that_is_too_long_stops_the_run_by_default() -> None:
    with pytest.raises(UserError) as raised:
        loader([{"question": "a"}, {"question": "abcd"}, {"question": "abcde"}], max_prompt_length=3)

    assert str(raised.value) == (
        "2 of 3 rows exceed `data.max_prompt_length` 3 tokens, the first of them listed, row 1. To keep all,"
        " raise `data.max_prompt_length` to at least 5, or set `data.overlong_rows: drop`"
    )


def test_a_response_that_is_too_long_counts_its_end() -> None:
    rows = [{"question": "a", "answer": "1234"}]

    assert loader(rows, response="answer", max_response_length=5).size == 1
    with pytest.raises(
        UserError, match=r"exceed `data.max_response_length` 4 tokens, .* `data.max_response_length` to at least 5$"
    ):
        loader(rows, response="answer", max_response_length=4)


def test_dropping_every_row_is_an_error() -> None:
    with pytest.raises(UserError, match=r"2 of 2 rows exceed .* raise `data.max_prompt_length` to at least 2$"):
        loader(numbered(12)[10:], max_prompt_length=1, overlong_rows="drop")  # two digits each


def test_the_limits_that_an_error_names_keep_all_rows() -> None:
    rows = [{"question": "abcd", "answer": "12"}, {"question": "ab", "answer": "123"}]
    limits = {"response": "answer", "max_prompt_length": 1, "max_response_length": 2}
    told = (
        "exceed `data.max_prompt_length` 1 or `data.max_response_length` 2 tokens, .* raise `data.max_prompt_length` to"
        " at least 4 and `data.max_response_length` to at least 4$"
    )
    for overlong in ("error", "drop"):
        with pytest.raises(UserError, match=told):
            loader(rows, overlong_rows=overlong, **limits)
    assert loader(rows, **(limits | {"max_prompt_length": 4, "max_response_length": 4})).size == 2


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="listed has no rows"):
        loader([])


def test_fewer_rows_than_a_step_draws_are_refused() -> None:
    with pytest.raises(UserError, match=r"3 rows, fewer than `data.prompts_per_step` 4; lower it to at most 3"):
        _ = loader(numbered(3), prompts_per_step=4).steps_per_epoch


def test_a_row_that_json_cannot_carry_is_named() -> None:
    with pytest.raises(UserError, match=r"listed, row 1: column `picture` is b'\\x00' \(Object of type bytes is not"):
        loader([{"question": "a"}, {"question": "b", "picture": b"\x00"}])


def test_datasets_that_read_differently_have_different_digests() -> None:
    rows = numbered(3)
    datasets = [rows, rows[:2], rows[::-1], [{"question": "01"}, {"question": "2"}], [{"question": "012"}]]
    digests = {loader(each).scan.digest for each in datasets} | {loader(rows, response="answer").scan.digest}

    assert len(digests) == 6
    assert loader(rows, seed=1).scan.digest in digests


def test_columns_that_only_a_reward_reads_change_the_digest() -> None:
    digests = {loader([{"question": "a", "answer": answer}]).scan.digest for answer in ("1", "2")}
    assert len(digests) == 2


def test_a_scan_of_several_chunks_misses_no_row() -> None:
    data = loader(numbered(2500), prompts_per_step=2500, shuffle=False)

    assert dealt(data, 0, 1) == list(range(2500))


PAIRED = {"response": "good", "rejected": "bad"}


def test_rows_with_a_rejected_response_are_pairs() -> None:
    rows = [{"question": "ab", "good": "xyz", "bad": ""}, {"question": "c", "good": "", "bad": "x"}]
    pairs, ids = loader(rows, prompts_per_step=2, shuffle=False, **PAIRED).batch(0, 0, 1)

    assert isinstance(pairs, Pairs)
    assert [ids.tolist() for ids in pairs.prompt_ids.rows()] == [[97, 98], [99]]
    assert [ids.tolist() for ids in pairs.chosen_ids.rows()] == [[120, 121, 122, 0], [0]]
    assert [ids.tolist() for ids in pairs.rejected_ids.rows()] == [[0], [120, 0]]
    assert pairs.rows == rows
    assert ids.tolist() == [0, 1]


def test_the_longer_response_of_a_pair_must_fit() -> None:
    rows = [{"question": "a", "good": good, "bad": bad} for good, bad in (("12", "1234"), ("1234", "1"), ("1", "12"))]
    data = loader(rows, prompts_per_step=1, max_response_length=4, overlong_rows="drop", **PAIRED)

    assert str(data.scan) == "listed: 1 of 3 rows kept; 2 too long, such as listed, row 0, listed, row 1"
    assert data.scan.longest_response == 5


def test_rejected_responses_change_the_digest() -> None:
    digests = {loader([{"question": "a", "good": "b", "bad": bad}], **PAIRED).scan.digest for bad in ("c", "d", "cc")}
    assert len(digests) == 3


@pytest.mark.parametrize("settings", [{}, {"response": "answer"}, PAIRED, {"response": "m"}], ids=str)
def test_a_row_is_tokenised_once_however_often_it_is_drawn(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"role": role, "content": role * 2} for role in ("user", "assistant", "user", "assistant")]
    rows = [
        {**row, "good": f"a{row['answer']}", "bad": "b", "m": turns[: 2 + 2 * (i % 2)]}
        for i, row in enumerate(numbered(4))
    ]
    data = loader(rows, prompts_per_step=2, **settings)
    again = data.encode(data._source, [3, 0])
    monkeypatch.setattr(data, "encode", None)
    assert data._counted is not None
    for one, other in zip(data._counted.examples(data._source, [3, 0]), again, strict=True):
        assert vars(one) == {**vars(other), "written": None if all(other.written or [True]) else other.written}
    assert len(data.batch(0, 0, 1)[0].rows) == len(data.batch(3, 0, 1)[0].rows) == 2


def test_a_row_that_changes_after_the_scan_is_named() -> None:
    rows = numbered(2)
    data = loader(rows, prompts_per_step=2)
    rows[1]["answer"] = "another"
    with pytest.raises(UserError, match="listed, row 1 has changed since all rows were scanned: the data"):
        data.batch(0, 0, 1)


@pytest.mark.parametrize("count", [1, 3, 100, 2**24 + 4])  # of the last one float32 would give a place past the end
def test_rows_that_are_spread_over_a_dataset_end_with_its_last(count: int) -> None:
    places = spread(count, 8)
    assert len(places.unique()) == min(count, 8)
    assert (int(places[0]), int(places[-1])) == (0, count - 1)
