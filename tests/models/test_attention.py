from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import Qwen2Config

from rlflow.errors import UserError
from rlflow.models.attention import (
    AttentionScores,
    check_sequence_parallel,
    flexible,
    packed_attention,
    seen_blocks,
    use_flash_attention_3,
)
from rlflow.models.prefixes import Prefixes
from tests.families.models import STATEFUL, configuration

LENGTHS = [3, 1, 6]
CU = torch.tensor([0, 3, 4, 10], dtype=torch.int32)


def states(heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, n, sum(LENGTHS), head_dim, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def by_the_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    lengths: list[int] = LENGTHS,
) -> Tensor:
    """softmax(q k / sqrt(d)) v, with a mask over the whole line: `[1, N, heads, head_dim]`.

    Scores s capped as in Gemma 2's report (2408.00118, section 2): softcap * tanh(s / softcap). A sink as in GPT-OSS's
    model card (2508.10925, section 2.3): one more term exp(sink) in the denominator of the softmax.
    """
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    behind = place[:, None] - place
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < window)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.exp() * seen
    total = weights.sum(3, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp()[:, None, None]
    return (weights / total @ value).transpose(1, 2)


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


SHAPES = [(0.5, False), (None, True), (0.5, True)]  # cap and sinks


def sinks(heads: int) -> Tensor:
    return torch.linspace(-1, 2, heads, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(("softcap", "sunk"), SHAPES)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_scores_are_capped_and_sinks_take_their_part(
    kv_heads: int, window: int | None, softcap: float | None, sunk: bool
) -> None:
    inputs, s_aux = states(4, kv_heads, 8), sinks(4) if sunk else None
    found, _ = packed_attention(
        nn.Identity(), *inputs, None, cu_seq_lens_q=CU, max_length_q=6, sliding_window=window, softcap=softcap,
        s_aux=s_aux,
    )  # fmt: skip
    expected = by_the_formula(*inputs, window or 10, softcap, s_aux)
    refuse_unlike(found, expected, (*inputs, *([] if s_aux is None else [s_aux])))


def refuse_unlike(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Values, and the gradient of each input."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (found, expected)]
    assert all(bool(gradient.any()) for gradient in gradients[1])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_capped_scores_and_sinks_are_the_same_where_each_line_is_one_sequence() -> None:
    inputs, s_aux = states(2, 1, 8), sinks(2)
    found, _ = packed_attention(nn.Identity(), *inputs, None, softcap=0.5, s_aux=s_aux)
    expected = by_the_formula(*inputs, 10, 0.5, s_aux, [10])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_share_of_the_heads_has_its_own_sinks() -> None:
    query, key, value = states(4, 2, 8)
    settings = {"cu_seq_lens_q": CU, "max_length_q": 6, "s_aux": sinks(4)}
    whole, _ = packed_attention(nn.Identity(), query, key, value, None, **settings)
    for share in range(2):
        part = query[:, 2 * share : 2 * share + 2], *(x[:, share : share + 1] for x in (key, value))
        found, _ = packed_attention(nn.Identity(), *part, None, **settings, share=share)
        torch.testing.assert_close(found, whole[:, :, 2 * share : 2 * share + 2], rtol=0, atol=1e-14)


@pytest.mark.parametrize(("softcap", "sunk"), SHAPES)
@pytest.mark.parametrize("window", [None, 40])
def test_what_cuda_computes_is_the_formula(
    window: int | None, softcap: float | None, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Flex attention uncompiled is the same function without a kernel. Torch allows it no gradients on the CPU, where a
    # compiled one would have none; uncompiled it has.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    lengths = [150, 1, 90, 59]  # 300 tokens: three blocks of the mask, the last in part
    generator = torch.Generator().manual_seed(0)
    inputs = tuple(
        torch.randn(1, heads, 300, 16, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    s_aux = sinks(4) if sunk else None
    cu = torch.tensor([0, 150, 151, 241, 300], dtype=torch.int32)
    found = flexible(*inputs, AttentionScores(0.25, window, softcap, s_aux), (cu, cu), flex_attention)
    expected = by_the_formula(*inputs, window or 300, softcap, s_aux, lengths)
    refuse_unlike(found, expected, (*inputs, *([] if s_aux is None else [s_aux])))


def test_the_cap_of_scores_reaches_a_compiled_kernel_as_a_tensor_of_its_device() -> None:
    # Dynamo makes a number that the scores refer to a scalar of float64 on the CPU, which no kernel for CUDA takes.
    given: list[Tensor] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.extend(each for each in inputs if isinstance(each, Tensor))
        return graph.forward

    compiled = torch.compile(flex_attention, dynamic=True, backend=keep)
    query, key, value = (states.detach().float() for states in states(4, 2, 16))
    flexible(query, key, value, AttentionScores(0.25, 3, 1.5, None), (CU, CU), compiled)
    assert [each.dtype for each in given if each.numel() == 1 and each == 1.5] == [torch.float32]


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("lengths", [[700], [150, 1, 300, 249], [128, 256, 128], [5]])
def test_blocks_are_left_out_where_no_token_sees_another(lengths: list[int], window: int | None) -> None:
    total = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = seen_blocks(cu, cu, total, total, window)
    expected = create_block_mask(found.mask_mod, 1, 1, total, total, device="cpu")
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(total)
    behind = place[:, None] - place
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < (window or total))
    assert torch.equal(create_mask(found.mask_mod, 1, 1, total, total, device="cpu")[0, 0], seen)
    # Torch's own looks at every pair of tokens, and keeps blocks that are seen in full apart.
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert found.shape == expected.shape == (1, 1, total, total)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("fresh", [[400, 30, 200], [400, 0, 1], [7, 300, 129]])
def test_blocks_of_fewer_queries_are_left_out_where_they_see_no_key(fresh: list[int], window: int | None) -> None:
    lengths = [400, 330, 500]
    queries, keys = (torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in (fresh, lengths))
    total, whole = sum(fresh), sum(lengths)
    found = seen_blocks(queries, keys, total, whole, window)
    row, place = (torch.cat([torch.tensor(part) for part in parts]) for parts in zip(*_places(lengths), strict=True))
    of_row, own = (
        torch.cat([values[row == i][lengths[i] - new :] for i, new in enumerate(fresh)]) for values in (row, place)
    )
    behind = own[:, None] - place
    seen = (of_row[:, None] == row) & (behind >= 0) & (behind < (window or whole))
    assert torch.equal(create_mask(found.mask_mod, 1, 1, total, whole, device="cpu")[0, 0], seen)
    needed = torch.zeros(-(-total // 128) * 128, -(-whole // 128) * 128, dtype=torch.bool)
    needed[:total, :whole] = seen
    needed = needed.view(-(-total // 128), 128, -(-whole // 128), 128).any(3).any(1)
    there = found.to_dense()[0, 0].bool()
    assert bool((there | ~needed).all())
    of_one_row = [len(set(of_row[block : block + 128].tolist())) == 1 for block in range(0, total, 128)]
    assert torch.equal(there[of_one_row], needed[of_one_row])


def _places(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """The row and the place in it of each token, row by row."""
    return [([row] * length, list(range(length))) for row, length in enumerate(lengths)]


# Rows 0 1 2 3 4, 0 1 5 and 0 1 5 6 of a line of 7 tokens; the second is within the third.
SHARED = Prefixes.of([np.array(row) for row in ([0, 1, 2, 3, 4], [0, 1, 5], [0, 1, 5, 6])])
FRESH = torch.tensor([0, 5, 6, 7], dtype=torch.int32)


def of_whole_rows(inputs: tuple[Tensor, ...], window: int, softcap: float | None, s_aux: Tensor | None) -> Tensor:
    """The formula's results for the last tokens of each row, those that the row before does not have."""
    query, key, value = inputs
    last = []
    for row, fresh in zip(SHARED.keys.split(SHARED.lengths().tolist()), FRESH.diff().tolist(), strict=True):
        whole = (states[:, :, row] for states in (query, key, value))
        last.append(by_the_formula(*whole, window, softcap, s_aux, [len(row)])[:, len(row) - fresh :])
    return torch.cat(last, 1)


@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), *SHAPES])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("by_flex", [False, True])
def test_rows_see_the_tokens_that_they_share(
    by_flex: bool, window: int | None, softcap: float | None, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    inputs = tuple(states[:, :, :7].detach().requires_grad_() for states in states(4, 2, 16))
    s_aux = sinks(4) if sunk else None
    if by_flex:
        key, value = (states[:, :, SHARED.keys] for states in inputs[1:])
        scores = AttentionScores(0.25, window, softcap, s_aux)
        found = flexible(inputs[0], key, value, scores, (FRESH, SHARED.cu_seqlens), flex_attention)
    else:
        settings = {"sliding_window": window, "softcap": softcap, "s_aux": s_aux, "prefixes": SHARED}
        found, _ = packed_attention(nn.Identity(), *inputs, None, cu_seq_lens_q=FRESH, max_length_q=5, **settings)
    expected = of_whole_rows(inputs, window or 7, softcap, s_aux)
    refuse_unlike(found, expected, (*inputs, *([] if s_aux is None else [s_aux])))


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


@pytest.mark.parametrize("name", STATEFUL)
def test_sequences_of_a_model_with_states_are_not_divided(name: str) -> None:
    with pytest.raises(UserError, match=r"^2 ranks divide the sequences of `actor`, and layers of its model, .* state"):
        check_sequence_parallel(configuration(name), 2, "actor")


@pytest.mark.parametrize(
    ("device", "major", "refused"),
    [
        ("cpu", 0, "whose kernels are for GPUs of compute capability 9.0, and the run is on cpu; leave it out"),
        ("cuda", 8, "whose kernels are for GPUs of compute capability 9.0, and the run is on cuda; leave it out"),
        ("cuda", 9, "and the package `flash_attn_interface` is not installed; install flash attention 3, or leave it"),
    ],
)
def test_flash_attention_3_is_refused_where_it_cannot_run(
    device: str, major: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    with pytest.raises(UserError, match=rf"^`flash_attention` is 3, {re.escape(refused)}"):
        use_flash_attention_3(torch.device(device))
