from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from rlflow.models import block_attention as module
from rlflow.models.attention import packed_attention
from rlflow.models.block_attention import block_attention

LENGTH = 5


def states(
    dtype: torch.dtype, lines: int, heads: tuple[int, int, int], length: int = LENGTH, widths: Sequence[int] = (8, 8, 8)
) -> list[Tensor]:
    """Queries, keys and values as layers have them: views of `[S, L, heads, head_dim]`."""
    generator = torch.Generator().manual_seed(0)
    sizes = zip(heads, widths, strict=True)
    drawn = [torch.randn(lines, length, *size, dtype=torch.float64, generator=generator) for size in sizes]
    return [each.to(dtype).transpose(1, 2).requires_grad_() for each in drawn]


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale q k) v with a triangular mask, each key and value for a group of neighbouring heads.

    Queries are the last of the keys.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    seen = torch.ones(key.shape[2], key.shape[2]).tril()[key.shape[2] - query.shape[2] :]
    weights = (scale * query @ key.transpose(2, 3)).exp() * seen
    return weights / weights.sum(3, keepdim=True) @ value


@pytest.mark.parametrize("queries", [LENGTH, 3])
@pytest.mark.parametrize("block", [1, 2, 5, 128])
@pytest.mark.parametrize(("heads", "lines"), [((4, 2, 2), 1), ((3, 1, 1), 2), ((2, 2, 2), 3)])
def test_outputs_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, block: int, heads: tuple[int, int, int], lines: int, queries: int
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    query, key, value = states(torch.float64, lines, heads)
    inputs = [query[:, :, LENGTH - queries :].detach().requires_grad_(), key, value]
    found, expected = block_attention(*inputs, 0.3), by_the_formula(*inputs, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected).sin()
    of_formula = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), inputs), of_formula, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [3, 4, 128])
@pytest.mark.parametrize("fresh", [[5, 1, 7, 2], [5, 0, 3, 2], [1, 1, 2, 1]])
def test_the_rows_of_a_line_attend_to_themselves_where_blocks_hold_several(
    monkeypatch: pytest.MonkeyPatch, block: int, fresh: list[int]
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    lengths = [5, 1, 7, 2]
    _, key, value = states(torch.float64, 1, (4, 2, 2), length=sum(lengths))
    query = states(torch.float64, 1, (4, 2, 2), length=sum(fresh))[0].detach().requires_grad_()
    inputs = [query, key, value]
    starts = tuple(torch.tensor([0, *each]).cumsum(0) for each in (fresh, lengths))
    found = block_attention(*inputs, 0.3, starts)
    rows = zip(query.split(fresh, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    expected = torch.cat([by_the_formula(*row, 0.3) for row in rows], 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.arange(expected.numel(), dtype=torch.float64).view_as(expected).sin()
    of_formula = torch.autograd.grad((expected * weights).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), inputs), of_formula, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("length", "together"), [(64, True), (65, False)])
def test_rows_of_up_to_64_tokens_in_bfloat16_share_blocks(
    monkeypatch: pytest.MonkeyPatch, length: int, together: bool
) -> None:
    calls = []
    monkeypatch.setattr("rlflow.models.attention.block_attention", lambda *given: calls.append(given) or given[0])
    inputs = states(torch.bfloat16, 1, (2, 2, 2), length=3 * length)
    starts = torch.arange(0, 3 * length + 1, length)
    packed_attention(nn.Identity(), *inputs, None, cu_seq_lens_q=starts, max_length_q=length)
    assert len(calls) == (1 if together else 3)


def test_bfloat16_on_the_cpu_is_off_by_no_more_than_its_rounding() -> None:
    inputs = states(torch.bfloat16, 1, (4, 2, 2), length=200)
    found, _ = packed_attention(
        nn.Identity(), *inputs, None, scaling=0.3, cu_seq_lens_q=torch.tensor([0, 60, 200]), max_length_q=140
    )
    pieces = ([each[:, :, part] for each in inputs] for part in (slice(60), slice(60, 200)))
    assert torch.equal(found, torch.cat([block_attention(*rows, 0.3).transpose(1, 2) for rows in pieces], dim=1))
    exact = [each.detach().double().requires_grad_() for each in inputs]
    first, second = ([each[:, :, part] for each in exact] for part in (slice(60), slice(60, 200)))
    expected = torch.cat([by_the_formula(*rows, 0.3).transpose(1, 2) for rows in (first, second)], dim=1)
    assert float((found - expected).norm() / expected.norm()) < 2**-7  # 8 bits, of scores, weights and outputs
    grads = torch.autograd.grad(found.float().square().sum(), inputs)
    of_formula = torch.autograd.grad(expected.square().sum(), exact)
    for grad, of_exact in zip(grads, of_formula, strict=True):
        assert float((grad - of_exact).norm() / of_exact.norm()) < 2**-6


def test_values_may_be_narrower_than_keys() -> None:
    query, key, value = states(torch.bfloat16, 1, (4, 4, 4), length=30, widths=(8, 8, 6))
    ends = torch.tensor([0, 30])
    found, _ = packed_attention(
        nn.Identity(), query, key, value, None, scaling=0.3, cu_seq_lens_q=ends, max_length_q=30
    )
    exact = by_the_formula(query.double(), key.double(), value.double(), 0.3).transpose(1, 2)
    assert float((found - exact).norm() / exact.norm()) < 2**-7
