from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from rlflow.errors import UserError
from rlflow.functional import Aggregation, Episodes, aggregate, loss_count, loss_sum, loss_weights, tokens_of

EVERY_MODE = pytest.mark.parametrize("mode", get_args(Aggregation))

# Responses of 1 and 3 tokens, with losses 1 and -1 on each of theirs.
MASK = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
LOSS = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])


def test_token_mean_counts_every_token_alike(known: dict[str, Any]) -> None:
    assert aggregate(LOSS, MASK, "token-mean").item() == known["aggregate"]["token_mean"]


def test_sequence_mean_token_mean_counts_every_sample_alike(known: dict[str, Any]) -> None:
    mean = aggregate(LOSS, MASK, "sequence-mean-token-mean").item()
    assert_close(mean, known["aggregate"]["sequence_mean_token_mean"], rtol=0, atol=1e-15)


def test_sequence_mean_token_sum_divides_by_samples() -> None:
    assert aggregate(LOSS, MASK, "sequence-mean-token-sum").item() == -1.0  # (1 - 3) / 2


def test_constant_divides_by_samples_and_the_longest_length(known: dict[str, Any]) -> None:
    expected = known["aggregate"]["sequence_mean_token_sum_over_constant_4"]
    assert aggregate(LOSS, MASK, "constant", max_length=4).item() == expected


def test_micro_batches_of_one_sample_still_give_the_token_mean(known: dict[str, Any]) -> None:
    parts = [(LOSS[i : i + 1], MASK[i : i + 1]) for i in range(2)]
    total = sum(loss_sum(loss, loss_weights(mask, "token-mean")) for loss, mask in parts)
    assert total / sum(loss_count(mask, "token-mean") for _, mask in parts) == known["aggregate"]["token_mean"]


@st.composite
def batches_in_parts(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A loss, a mask with holes and empty rows, and a cut of the rows into parts of any size, empty ones among them."""
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    owner = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return loss, mask, [torch.nonzero(owner == part).flatten() for part in range(5)]


@EVERY_MODE
@settings(max_examples=60, deadline=None)
@given(batches_in_parts())
def test_any_cut_by_rows_gives_the_loss_and_the_gradient_of_the_whole(
    mode: Aggregation, batch: tuple[Tensor, Tensor, list[Tensor]]
) -> None:
    loss, mask, parts = batch
    whole = loss.clone().requires_grad_()
    aggregate(whole, mask, mode, max_length=9).backward()

    cut = loss.clone().requires_grad_()
    count = torch.stack([loss_count(mask[rows], mode) for rows in parts]).sum().clamp(min=1)
    for rows in parts:
        longest = max([0, *mask[rows].nonzero()[:, 1].add(1).tolist()])  # each part is padded to its own longest row
        weights = loss_weights(mask[rows, :longest], mode, max_length=9)
        (loss_sum(cut[rows, :longest], weights) / count).backward()

    assert cut.grad is not None
    assert_close(cut.grad, whole.grad, rtol=1e-14, atol=0)


def test_episode_mean_counts_every_episode_alike() -> None:
    loss = torch.tensor([[1.0, 3.0, 9.0], [9.0, 9.0, 5.0], [9.0, 9.0, 9.0], [-1.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]])
    episode = torch.tensor([0, 0, 1, 2])  # of which 1 has no token: ((1 + 3 + 5) / 3 + -1 / 1) / 2
    assert aggregate(loss, mask, "episode-mean", episode=episode).item() == 1.0
    assert aggregate(loss, mask, "token-mean", episode=episode).item() == 2.0  # 8 / 4; no other mode reads it


def test_episode_mean_of_a_loss_per_sample_is_the_mean_of_each_episode_s_samples() -> None:
    episode = torch.tensor([0, 1, 0])  # (2 + 4) / 2 and 7
    assert aggregate(torch.tensor([2.0, 7.0, 4.0]), torch.ones(3), "episode-mean", episode=episode).item() == 5.0


def mean_of_episodes(loss: Tensor, mask: Tensor, episode: Tensor) -> Tensor:
    """`sum_e (sum_it m l / sum_it m) / E` by loops over tokens."""
    tokens: dict[int, list[Tensor]] = {}
    for row, of in enumerate(episode.tolist()):
        tokens.setdefault(of, []).extend(loss[row, t] for t in range(loss.shape[1]) if mask[row, t])
    means = [torch.stack(each).sum() / len(each) for each in tokens.values() if each]
    return torch.stack(means).sum() / len(means) if means else loss.sum() * 0


@settings(max_examples=60, deadline=None)
@given(batches_in_parts(), st.integers(1, 5))
def test_episode_mean_is_that_of_episodes_for_any_cut_by_rows(
    batch: tuple[Tensor, Tensor, list[Tensor]], episodes: int
) -> None:
    loss, mask, parts = batch
    episode = torch.arange(len(loss)) % episodes  # so that rows of one are in several parts
    expected, found = (loss.clone().requires_grad_() for _ in range(2))
    whole = mean_of_episodes(expected, mask, episode)
    whole.backward()

    known = Episodes.of(tokens_of(mask), episode)
    count = sum(int(loss_count(mask[rows], "episode-mean", known.take(rows))) for rows in parts)
    shares = [
        loss_sum(found[rows], loss_weights(mask[rows], "episode-mean", episodes=known.take(rows))) / max(1, count)
        for rows in parts
    ]
    total = torch.stack(shares).sum()
    total.backward()

    assert count == len({int(of) for row, of in enumerate(episode) if mask[row].any()})
    assert_close(total, whole, rtol=1e-12, atol=1e-12)
    assert_close(found.grad, expected.grad, rtol=1e-12, atol=0)


@EVERY_MODE
def test_a_loss_per_sample_is_averaged_over_samples_with_a_token(mode: Aggregation) -> None:
    loss = torch.tensor([2.0, 100.0, 4.0])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    assert aggregate(loss, mask, mode, max_length=5).item() == 3.0
    assert aggregate(loss, mask.any(dim=1), mode, max_length=5).item() == 3.0


@pytest.mark.parametrize("mode", [mode for mode in get_args(Aggregation) if mode != "constant"])
def test_a_row_without_tokens_changes_nothing(mode: Aggregation) -> None:
    loss, mask = torch.cat([LOSS, torch.full((1, 3), 9.0)]), torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    with_the_row, without = (aggregate(*batch, mode, max_length=4) for batch in ((loss, mask), (LOSS, MASK)))
    assert_close(with_the_row, without, rtol=0, atol=1e-15)


def test_constant_divides_by_rows_without_tokens_too() -> None:
    mask = torch.cat([MASK, torch.zeros(2, 3, dtype=torch.bool)])
    loss = torch.cat([LOSS, torch.full((2, 3), 9.0)])
    assert aggregate(loss, mask, "constant", max_length=4).item() == -2 / (4 * 4)  # (1 - 3) over four rows


@EVERY_MODE
def test_nan_on_padding_reaches_neither_loss_nor_gradient(mode: Aggregation) -> None:
    loss = LOSS.where(MASK, torch.nan).requires_grad_()
    total = aggregate(loss, MASK, mode, max_length=4)
    total.backward()
    assert total == aggregate(LOSS, MASK, mode, max_length=4)
    assert loss.grad is not None
    assert (loss.grad[~MASK] == 0.0).all()


@EVERY_MODE
def test_a_batch_without_tokens_is_zero_and_stays_in_the_graph(mode: Aggregation) -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        loss = torch.zeros(shape, requires_grad=True)
        total = aggregate(loss, torch.zeros(shape, dtype=torch.bool), mode, max_length=4)
        total.backward()
        assert total.item() == 0.0
        assert loss.grad is not None


@EVERY_MODE
def test_a_mask_of_numbers_is_as_good_as_one_of_booleans(mode: Aggregation) -> None:
    assert aggregate(LOSS, MASK.float(), mode, max_length=4) == aggregate(LOSS, MASK, mode, max_length=4)
    assert loss_count(MASK.float(), mode).dtype == torch.int64


def test_a_float32_loss_stays_float32_and_a_float64_loss_loses_nothing() -> None:
    mask = torch.ones(1, 3)
    assert aggregate(torch.ones(1, 3), mask, "sequence-mean-token-mean").dtype == torch.float32
    thirds = loss_weights(mask, "sequence-mean-token-mean")
    assert_close(
        loss_sum(torch.ones(1, 3, dtype=torch.float64), thirds), torch.tensor(1.0).double(), rtol=0, atol=1e-15
    )


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"'token_mean' does not exist; choose one of token-mean, sequence-mean"):
        aggregate(LOSS, MASK, "token_mean")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        loss_count(MASK, "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("max_length", [None, 0])
def test_constant_without_a_length_is_refused(max_length: int | None) -> None:
    with pytest.raises(UserError, match=rf"`max_length` is {max_length}"):
        aggregate(LOSS, MASK, "constant", max_length)


@EVERY_MODE
@pytest.mark.parametrize("per_sample", [False, True])
def test_gradients_agree_with_finite_differences(mode: Aggregation, per_sample: bool) -> None:
    mask = torch.arange(4) < torch.tensor([4, 0, 1, 3])[:, None]
    loss = torch.randn(4, dtype=torch.float64) if per_sample else torch.randn(4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: aggregate(x, mask, mode, max_length=5), loss.requires_grad_())
