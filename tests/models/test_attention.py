from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config

from rlflow.errors import UserError
from rlflow.models.attention import check_sequence_parallel, packed_attention

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


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (12, 4, 2)])
def test_heads_are_dealt_to_ranks_where_both_kinds_divide(heads: int, kv_heads: int, size: int) -> None:
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    check_sequence_parallel(config, size, "actor")


@pytest.mark.parametrize(("heads", "kv_heads", "size", "legal"), [(8, 2, 3, "1, 2, 4, 8"), (12, 4, 3, "1, 2, 4, 12")])
def test_heads_that_ranks_cannot_share_are_refused_with_the_sizes_that_fit(
    heads: int, kv_heads: int, size: int, legal: str
) -> None:
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    told = f"size of `critic` is {size}, and its model has {heads} attention heads and {kv_heads} of .* one of {legal}$"
    with pytest.raises(UserError, match=told):
        check_sequence_parallel(config, size, "critic")


def test_padded_sequences_are_not_divided() -> None:
    with pytest.raises(UserError, match=r"`strategy\.packing` is off, and 2 ranks divide the sequences of `actor`"):
        check_sequence_parallel(Qwen2Config(), 2, "actor", packing=False)
