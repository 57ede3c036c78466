"""Scores over the tokens from which responses were sampled, however rows are laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM, UserError
from rlflow.models.handle import ForwardPlan
from rlflow.models.logprobs import Softmax, token_logprobs
from rlflow.models.packing import pack, supports
from rlflow.values.batch import TokenRows
from rlflow.values.ragged import Ragged
from rlflow.values.truncation import END
from tests.prefix_rows import forked_rows

V = 11


def test_values_and_gradients_are_those_of_a_softmax_over_the_support() -> None:
    """In float64, for a capped head in chunks; of one place all tokens are in the support, of one the target alone."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(V, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.tensor([3, 0, 7, 10])
    support = torch.tensor([[3, 9, 1], [-1, 0, 0], [7, 7, 7], [2, 10, 10]])
    sets = [[1, 3, 9], list(range(V)), [7], [2, 10]]
    found = token_logprobs(hidden, weight, targets, Softmax(0.7, cap=2.0), 2 * V, support)
    logits = 2.0 * torch.tanh(hidden @ weight.T / 2.0) / 0.7
    of_places = [logits[place, ids].log_softmax(0) for place, ids in enumerate(sets)]
    pairs = zip(of_places, sets, targets.tolist(), strict=True)
    logprobs = torch.stack([of_place[ids.index(target)] for of_place, ids, target in pairs])
    entropy = torch.stack([-(of_place.exp() * of_place).sum() for of_place in of_places])
    torch.testing.assert_close(found, (logprobs, entropy), rtol=0, atol=1e-12)
    first, second = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    gradients = [
        torch.autograd.grad((logprobs * first + entropy * second).sum(), (hidden, weight))
        for logprobs, entropy in (found, (logprobs, entropy))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def with_support(rows: TokenRows, vocabulary: int = 128) -> tuple[TokenRows, list[list[list[int]]]]:
    """Rows, the second sampled from all tokens; and the tokens of each place, by row."""
    generator = torch.Generator().manual_seed(0)
    sets, entries = list[list[list[int]]](), list[list[int]]()
    for row, (response, length) in enumerate(zip(rows.response_ids.tolist(), rows.lengths.tolist(), strict=True)):
        of_row = []
        for token in response[:length]:
            count = int(torch.randint(6, (1,), generator=generator))
            others = torch.randperm(vocabulary, generator=generator)[:count].tolist()
            of_row.append([token, *(other for other in others if other != token)])
        sets.append([list(range(vocabulary)) for _ in of_row] if row == 1 else of_row)
        entries.append([] if row == 1 else [entry for token, *others in of_row for entry in (*others, END)])
    return replace(rows, columns={"support": Ragged.from_lists(entries, torch.int32)}), sets


@torch.no_grad()
def alone(model: Any, rows: TokenRows, sets: list[list[list[int]]], temperature: float) -> tuple[Tensor, Tensor]:
    """By transformers' own forward of each row."""
    logprobs = torch.zeros(rows.response_ids.shape, dtype=model.dtype)
    entropy = torch.zeros_like(logprobs)
    for row, prompt in enumerate(rows.prompt_ids.rows()):
        response = rows.response_ids[row, : rows.lengths[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0] / temperature
        for place, (token, ids) in enumerate(zip(response.tolist(), sets[row], strict=True)):
            within = logits[len(prompt) + place - 1, ids].log_softmax(0)
            logprobs[row, place] = within[ids.index(token)]
            entropy[row, place] = -(within.exp() * within).sum()
    return logprobs, entropy


@pytest.mark.parametrize("plan", [ForwardPlan(share_prefixes=True), ForwardPlan(20), ForwardPlan(packing=False)])
def test_every_layout_of_rows_gives_the_scores_of_each_row_alone(
    plan: ForwardPlan, handle: Callable[..., CausalLM], tiny: Path
) -> None:
    rows, sets = with_support(forked_rows())
    line = pack(rows, share_prefixes=True)
    assert line.prefixes is not None, "rows share prefixes as without a support"
    assert not line.columns, "sequences are divided as without a support"
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    found, expected = handle(plan, temperature=0.7).score(rows), alone(model, rows, sets, 0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_support_has_a_place_for_each_token_of_a_response() -> None:
    rows = TokenRows(
        Ragged.from_lists([[1], [1], [1]]), torch.tensor([[5, 6], [7, 0], [8, 9]]), torch.tensor([2, 1, 2])
    )
    column = Ragged.from_lists([[3, 4, END, END], [], [9, END, 1, END]], torch.int32)
    found = supports(replace(rows, columns={"support": column}))
    assert found is not None
    assert found.tolist() == [[3, 4, 5], [6, 6, 6], [-1, 7, 7], [9, 8, 8], [1, 9, 9]]


def test_scores_over_the_vocabulary_refuse_such_rows(handle: Callable[..., CausalLM]) -> None:
    rows, _ = with_support(forked_rows())
    with pytest.raises(UserError, match="`topk` is over the whole vocabulary, and the rows were sampled from some"):
        handle(ForwardPlan()).topk(rows, 2)
