from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlflow.errors import UserError
from rlflow.models.attention import packed_attention

LENGTHS = [3, 1, 6]
CU = torch.tensor([0, 3, 4, 10], dtype=torch.int32)


def states(heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, n, sum(LENGTHS), head_dim, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """softmax(q k / sqrt(d)) v, with a mask over the whole line: `[1, N, heads, head_dim]`."""
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    behind = place[:, None] - place
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < window)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    return (scores.masked_fill(~seen, -torch.inf).softmax(3) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (3, 1, 7)])
@pytest.mark.parametrize("window", [None, 2])
def test_each_sequence_attends_to_itself_alone(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    inputs = states(heads, kv_heads, head_dim)
    found, _ = packed_attention(nn.Identity(), *inputs, None, cu_seq_lens_q=CU, max_length_q=6, sliding_window=window)
    expected = by_the_formula(*inputs, window or 10)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_without_starts_each_line_is_one_sequence() -> None:
    query, key, value = (x.view(2, 2, 5, 8) for x in states(2, 2, 8))
    found, _ = packed_attention(nn.Identity(), query, key, value, None)
    for line in range(2):
        alone, _ = packed_attention(
            nn.Identity(), *(x[line : line + 1] for x in (query, key, value)), None,
            cu_seq_lens_q=torch.tensor([0, 5], dtype=torch.int32), max_length_q=5,
        )  # fmt: skip
        torch.testing.assert_close(found[line], alone[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("setting", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_attention_that_is_more_than_a_softmax_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(UserError, match="caps attention scores or has attention sinks"):
        packed_attention(nn.Identity(), *states(2, 2, 8), None, **setting)  # type: ignore[arg-type]
