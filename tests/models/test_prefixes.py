"""The tokens of a line that rows share, and the tokens that each row sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models import packed, packing, prefixes
from rlflow.models.attention import packed_attention
from rlflow.models.causal_lm import CausalLM, ScoringModel
from rlflow.models.handle import ForwardPlan
from rlflow.models.lora import LoRA
from rlflow.models.packing import pack, shared_micro_batches, take
from rlflow.models.prefixes import families, gather, neighbours
from rlflow.testing.derivative import wide_casts
from rlflow.values.batch import Pairs, TokenRows
from rlflow.values.column_kinds import ColumnKind
from rlflow.values.columns import Column
from rlflow.values.ragged import Ragged
from tests.models.conftest import one_by_one
from tests.models.test_causal_lm import named_gradients
from tests.prefix_rows import forked_rows, rows_of

Build = Callable[..., CausalLM]
TEN = list(range(40, 50))


def fed(rows: TokenRows) -> list[tuple[int, ...]]:
    """The tokens that a model reads of each row that has a response."""
    pairs = zip(rows.prompt_ids.rows(), rows.response_ids, rows.lengths.tolist(), strict=True)
    return [(*prompt.tolist(), *response[: length - 1].tolist()) for prompt, response, length in pairs if length]


def test_the_line_of_two_responses_to_a_prompt_is_the_one_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST", 2)
    line = pack(rows_of([([5, 6], [7, 8]), ([5, 6], [9, 8])]), share_prefixes=True)
    assert line.input_ids.tolist() == [[5, 6, 7, 9]]
    assert line.position_ids.tolist() == [[0, 1, 2, 2]]
    assert line.cu_seqlens is not None
    assert line.cu_seqlens.tolist() == [0, 3, 4]
    assert line.scored.tolist() == [1, 2, 1, 3]  # 6 scores 7 and 9
    assert line.targets.tolist() == [7, 8, 9, 8]
    assert line.prefixes is not None
    assert line.prefixes.keys.tolist() == [0, 1, 2, 0, 1, 3]
    assert line.prefixes.cu_seqlens.tolist() == [0, 3, 6]
    assert (line.prefixes.max_seqlen, line.max_seqlen, line.useful_tokens) == (3, 3, 4)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_each_prefix_is_read_once_and_each_row_sees_its_own_tokens(responses: list[list[int]]) -> None:
    rows = rows_of([([1], response) for response in responses])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefixes, "SHORTEST", 1)
        line = pack(rows, share_prefixes=True)
    read = fed(rows)
    distinct = {row[: length + 1] for row in read for length in range(len(row))}  # a tree, by brute force
    assert line.input_ids.numel() == len(distinct) == line.useful_tokens
    if line.prefixes is None:  # no two rows begin alike: there is one row
        assert len(read) == 1
        return
    assert line.cu_seqlens is not None
    seen = line.prefixes.keys.split(line.prefixes.lengths().tolist())
    assert sorted(tuple(line.input_ids[0, keys].tolist()) for keys in seen) == sorted(read)
    for keys, end, start in zip(seen, line.cu_seqlens[1:].tolist(), line.cu_seqlens.tolist(), strict=False):
        assert line.position_ids[0, keys].tolist() == list(range(len(keys)))
        assert keys[len(keys) - (end - start) :].tolist() == list(range(start, end))  # its queries are its last keys
    # A token is scored from the end of what comes before it in its row.
    depth = line.position_ids[0, line.scored]
    assert depth.tolist() == [place for row in read for place in range(len(row))]
    assert line.targets.tolist() == [token for response in responses for token in response]


def test_prefixes_of_fewer_tokens_are_not_shared() -> None:
    assert prefixes.SHORTEST == 8
    of_7, of_8 = ([(TEN[:count], [1, 2]), (TEN[:count], [3, 4])] for count in (7, 8))
    assert pack(rows_of(of_7), share_prefixes=True).prefixes is None
    assert pack(rows_of(of_8), share_prefixes=True).useful_tokens == 8 + 2


def test_rows_that_share_nothing_are_packed_as_ever(rows: TokenRows) -> None:
    line, plain = pack(rows, share_prefixes=True), pack(rows)
    assert torch.equal(line.input_ids, plain.input_ids)
    assert line.prefixes is None


def test_a_token_that_is_read_with_other_experts_is_not_shared() -> None:
    rows = rows_of([(TEN, [1, 2]), (TEN, [3, 4]), (TEN, [5, 6])])
    experts = torch.zeros(3, 11, 2, 1, dtype=torch.uint8)
    experts[2, 9:] = 3  # of the third row, from its 10th token on
    columns = {"experts": Ragged(experts.flatten(0, 1), torch.full((3,), 11))}
    line = pack(replace(rows, columns=columns), share_prefixes=True)
    assert line.useful_tokens == 10 + 1 + 1 + 2
    assert line.prefixes is not None
    seen = line.prefixes.keys.split(11)
    found = sorted(line.columns["experts"][keys].flatten(1).tolist() for keys in seen)
    assert found == sorted(experts.flatten(2).tolist())


def test_gradients_of_what_is_taken_often_are_summed_in_float32() -> None:
    states = torch.ones(1, 3, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    gather(states, 2, torch.tensor([1] * 300)).sum().backward()
    assert states.grad is not None
    assert states.grad[0, 0, :, 0].tolist() == [0, 300]  # in bfloat16 a sum of ones ends at 256


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14),
    st.integers(1, 40),
)
def test_every_row_is_in_one_family_that_costs_the_tokens_of_its_line(rows: list[list[int]], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefixes, "SHORTEST", 1)
        found = families([np.array(row) for row in rows], budget)
    assert sorted(number for members, _ in found for number in members) == list(range(len(rows)))
    for members, cost in found:  # nothing is looked at again by 16 tokens, which would cost one more
        assert cost == len(
            {tuple(rows[number][: length + 1]) for number in members for length in range(len(rows[number]))}
        )
        assert cost <= budget or len(members) == 1


def test_families_stay_together_and_cost_what_their_line_does() -> None:
    rows = [np.array(row) for row in ([*TEN, 1, 2], [9] * 5, [*TEN, 3], [*TEN, 1, 4, 5])]
    order, shared = neighbours(rows)
    assert [rows[number].tolist()[-1] for number in order] == [9, 2, 5, 3]
    assert shared == [0, 0, 11, 10]
    # 12 tokens, 2 more of 13 and 1 more of 11; a 16th of the 21 that are looked at again is 0 for each.
    assert sorted(families(rows, 100)) == [([0, 3, 2], 15), ([1], 5)]
    assert sorted(families(rows, 14)) == [([0, 3], 14), ([1], 5), ([2], 11)]
    long = np.arange(1000)
    assert families([np.append(long, row) for row in range(3)], 5000) == [([0, 1, 2], 1001 + 2 * (1 + 62))]


def test_a_large_family_is_cut_where_its_prompts_part_and_not_within_one() -> None:
    prompts = [[*TEN, prompt, *[prompt] * 29] for prompt in (1, 2, 3)]  # all begin with a chat template of 10 tokens
    rows = [np.array([*prompt, sample, 7]) for sample in (4, 5, 6) for prompt in prompts]
    # 42 + 2 x 2 new ones, and 40 // 16 = 2 for what two rows look at again: 50 each
    assert sorted(families(rows, 129)) == [([0, 3, 6], 50), ([1, 4, 7], 50), ([2, 5, 8], 50)]
    (whole,) = families(rows, 130)
    assert whole[1] == 50 + 2 * (50 - 10)  # the template costs nothing again: 10 // 16


def test_micro_batches_of_unlike_experts_stay_within_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = rows_of([([5] * 40, [sample + 2, 3, 4]) for sample in range(8)])
    experts = torch.randint(0, 8, (8 * 42, 2, 1), dtype=torch.uint8, generator=generator)
    rows = replace(rows, columns={"experts": Ragged(experts, torch.full((8,), 42))})
    parts = shared_micro_batches(rows, 100)
    assert all(pack(take(rows, part), share_prefixes=True).useful_tokens <= 100 for part in parts)


def test_rows_with_entries_of_no_token_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    column = Column("patches", ColumnKind.RAGGED, model_input="any")
    monkeypatch.setitem(packing.MODEL_INPUTS, column.name, column)
    rows = rows_of([(TEN, [1, 2]), (TEN, [3, 4])])
    line = pack(replace(rows, columns={"patches": Ragged.from_lists([[4, 5], [6]])}), share_prefixes=True)
    assert line.prefixes is None
    assert line.columns["patches"].tolist() == [4, 5, 6]


def test_micro_batches_have_whole_families_within_the_budget() -> None:
    rows = rows_of([([prompt] * 40, [sample + 2, 3, 4]) for sample in range(4) for prompt in range(6)])
    parts = ForwardPlan(108).split(rows)
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    for part in parts:
        line = pack(take(rows, part), share_prefixes=True)
        assert len(set((part % 6).tolist())) == len(part) // 4  # of each prompt all four samples
        assert line.useful_tokens == len(part) // 4 * (40 + 4 * 2) <= 108
    # A family costs 48, and a 16th of the 40 tokens that three of its rows look at again: 2 each.
    assert len(parts) == 3
    assert len(ForwardPlan(108).split(rows, at_least=9)) == 9


def test_a_pair_costs_its_prompt_once() -> None:
    prompts, chosen, rejected = (Ragged.from_lists([tokens] * 2) for tokens in (TEN * 2, [3, 1, 2], [4, 1, 2]))
    pairs, cost = Pairs(prompts, chosen, rejected, rows=[{}] * 2), 22 + 2 + 1  # 20 // 16 for what is looked at again
    assert [len(part) for part in ForwardPlan(2 * cost).split(pairs)] == [2]
    assert [len(part) for part in ForwardPlan(2 * cost - 1).split(pairs)] == [1, 1]


@pytest.mark.parametrize("token_budget", [40, 4096])
def test_scores_and_gradients_are_those_of_each_row_alone(tiny: Path, handle: Build, token_budget: int) -> None:
    rows = forked_rows()
    model, reference = (
        handle(ForwardPlan(token_budget)),
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64),
    )
    weights = torch.randn(2, *rows.response_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with wide_casts():
        expected = one_by_one(reference, rows)
        torch.testing.assert_close(model.score(rows), expected, rtol=0, atol=1e-12)
        (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
        with model.training():
            for part in model.plan.micro_batches(rows):
                logprobs, entropy = model.score(take(rows, part))
                (logprobs * weights[0][part] + entropy * weights[1][part]).sum().backward()
    for (name, found), parameter in zip(named_gradients(model), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert float((found - parameter.grad).norm() / parameter.grad.norm()) < 1e-12, name


def test_adapters_with_dropout_read_each_row_alone(handle: Build) -> None:
    shares = [
        handle(ForwardPlan(), lora=LoRA(2, dropout=dropout)).plan.model_input(forked_rows()).prefixes is not None
        for dropout in (0.0, 0.1)
    ]
    assert shares == [True, False]


def test_a_divided_line_scores_row_by_row() -> None:
    line = pack(forked_rows(), share_prefixes=True)
    assert line.scored.diff().min() < 0  # a later row scores from an earlier token
    parts = line.divide(3)
    values = tuple(part.targets for part in parts)
    assert [torch.equal(part.in_order((torch.cat(values),))[0], line.targets) for part in parts] == [True] * 3
    for part in parts:
        assert part.prefixes is not None
        assert part.prefixes.cu_seqlens[-1] == len(part.prefixes.keys)


def test_a_model_that_does_not_see_what_rows_share_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*inputs: Any, prefixes: object, **settings: Any) -> Any:
        return packed_attention(*inputs, **settings)

    monkeypatch.setattr(packed, "packed_attention", blind)
    model = ScoringModel.load(tiny, torch.float32, torch.device("cpu"))
    model.check(model, torch.device("cpu"))
    with pytest.raises(
        UserError, match=r"packed one differ by .* or set `strategy\.init_args\.share_prefixes: false`$"
    ):
        model.check(model, torch.device("cpu"), share_prefixes=True)
