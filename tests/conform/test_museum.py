"""The museum: `conform`'s diagnosis of each exhibit, and the numbers of the threads, computed by our functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlflow.conform import museum
from rlflow.conform.museum import EVERY, Exhibit


@pytest.mark.parametrize("exhibit", EVERY, ids=lambda each: each.name)
def test_each_exhibit_gets_its_expected_diagnosis(exhibit: Exhibit) -> None:
    found = exhibit.found()
    assert exhibit.is_named(found), found


def test_wrong_exhibits_differ_and_others_do_not() -> None:
    verdicts = {"differs": 0, "convention": 0}
    for each in EVERY:
        verdicts[each.verdict] += 1
    assert verdicts["differs"] >= 25
    assert verdicts["convention"] >= 25  # right, contested, and false alarms


def numbers(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def ints(*rows: object) -> Tensor:
    return torch.tensor(rows)


def near(found: Tensor, *expected: object) -> bool:
    return torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4)


def test_one_baseline_for_all_prompts_changes_the_advantages() -> None:
    # groups {1, 3} and {5}: the mean of all is 3, those of the groups are 2 and 5
    given = numbers(1, 3, 5), ints(0, 0, 1)
    assert near(museum.one_baseline_for_all_prompts(*given), -2, 0, 2)
    assert near(museum.one_baseline_for_each_prompt(*given), -1, 1, 0)


def test_a_deviation_by_squares_blows_up_in_float32() -> None:
    # the other seven are equal, so the true deviation is 0 and A = 0 - 0.95; the residue depends on the order of sums
    largest = []
    for reward in (0.3, 0.35, 0.4, 0.7, 0.95):
        given = torch.tensor([0.0, *[reward] * 7]), ints(*[0] * 8)
        largest.append(museum.leave_one_out_deviation_by_squares(*given)[0].abs().item())
        assert near(museum.leave_one_out_deviation_of_equals_is_0(*given)[:1], -reward)
    assert max(largest) > 100


def test_a_rollout_counted_once_per_row_moves_the_baseline() -> None:
    # rollout a (reward 1) in three rows, b (reward 0) in one: the mean is 3 / 4 over rows, 1 / 2 over rollouts
    given = numbers(1, 1, 1, 0), ints(0, 0, 0, 0), ints(0, 0, 0, 1)
    assert near(museum.a_rollout_counted_once_per_row(*given), 0.25, 0.25, 0.25, -0.75)
    assert near(museum.a_rollout_counted_once(*given), 0.5, 0.5, 0.5, -0.5)


def test_a_rejected_sibling_moves_the_baseline() -> None:
    # 100 is rejected: the mean of both is 50.5, that of the accepted 1
    given = numbers(100, 1), ints(0, 0), numbers([0, 0], [1, 1])
    assert near(museum.a_rejected_sibling_in_the_baseline(*given)[1:], -49.5)
    assert near(museum.accepted_siblings_in_the_baseline(*given)[1:], 0)
    assert near(museum.a_lone_row_keeps_its_reward(*given)[1:], 1)


def test_a_return_reset_at_a_tool_s_tokens_loses_the_later_reward() -> None:
    rewards, mask = numbers([0, 0, 0, 0, 0, 1]), numbers([1, 1, 0, 0, 1, 1])
    counted = mask[0] != 0
    assert near(museum.the_return_reset_at_masked_tokens(rewards, mask, 1.0)[0, counted], 0, 0, 1, 1)
    assert near(museum.the_return_carried_over_masked_tokens(rewards, mask, 1.0)[0, counted], 1, 1, 1, 1)
    # one decay over the gap: 0.5 for the first of two actions
    gap = museum.the_return_carried_over_masked_tokens(numbers([0, 0, 1]), numbers([1, 0, 1]), 0.5)
    assert near(gap[0, [0, 2]], 0.5, 1)


def test_gae_over_all_tokens_discounts_observations_too() -> None:
    # two actions, then two observed tokens, reward 1, V = 0, gamma 0.5: 0.5^3 and 0.5^2, or 0.5 and 1
    given = numbers(1), numbers([0, 0, 0, 0]), numbers([1, 1, 0, 0]), 0.5, 1.0
    assert near(museum.gae_over_all_tokens(*given)[0, :2], 0.125, 0.25)
    assert near(museum.gae_over_the_tokens_that_count(*given)[0, :2], 0.5, 1)


def test_values_of_masked_slots_leak_into_gae() -> None:
    # delta_2 = -100, delta_1 = 1 + 100: A_1 = 101 - 95 = 6, A_0 = 0.95 * 6
    given = numbers([0, 1, 0]), numbers([0, 0, 100]), numbers([1, 1, 0]), 0.95
    assert near(museum.values_of_masked_slots_bootstrapped(*given)[0, :2], 5.7, 6)
    assert near(museum.values_of_masked_slots_left_out(*given)[0, :2], 0.95, 1)


def test_a_mask_from_ids_that_are_never_minus_100_counts_padding() -> None:
    rewards, ids, labels = numbers([1.5, 1, 2, 2]), ints([5, 6, 0, 0]), ints([5, 6, -100, -100])
    assert near(museum.a_mask_from_ids_that_are_never_minus_100(rewards, ids, labels, 1.0), [6.5, 5, 4, 2])
    assert near(museum.a_mask_from_labels(rewards, ids, labels, 1.0)[0, :2], 2.5, 1)


def test_advantages_in_place_of_the_mask_weigh_tokens_twice() -> None:
    # -(2 * 2 + 1 * 1) / (2 - 1), or -(2 - 1) / 2
    given = numbers([0, 0]), numbers([0, 0]), numbers([2, -1]), numbers([1, 1])
    assert near(museum.advantages_in_place_of_the_mask(*given).reshape(1), -5)
    assert near(museum.the_mask_in_its_place(*given).reshape(1), -0.5)


def test_a_subtracted_kl_has_the_opposite_gradient() -> None:
    # k3 = ref / p - 1 - log(ref / p) = 0.5 - 1 + log 2; its derivative 1 - ref / p = 0.5
    for function, sign in ((museum.kl_subtracted, -1), (museum.kl_added, 1)):
        p = numbers([math.log(0.5)]).requires_grad_()
        given = p.detach(), numbers([math.log(0.25)]), numbers([0]), numbers([1]), 1.0
        loss = function(p, *given)
        loss.backward()
        assert near(loss.detach().reshape(1), sign * 0.1931)
        assert p.grad is not None
        assert near(p.grad, [sign * 0.5])


def test_sequence_losses_weighted_by_length_do_not_cancel() -> None:
    # losses 1 and -1 of lengths 1 and 3: (1 - 3) / 4, or 0
    equal, mask = torch.zeros(2, 3).double(), numbers([1, 0, 0], [1, 1, 1])
    for advantages, function, loss in (
        (numbers([-1] * 3, [1] * 3), museum.a_sequence_s_loss_weighted_by_its_length, -0.5),
        (numbers(-1, 1), museum.a_sequence_s_loss_counted_once, 0.0),
    ):
        rows = advantages[:, 0] if advantages.dim() == 2 else advantages
        assert near(function(equal, equal, rows, mask, 0.2, 0.2).reshape(1), loss)


def test_means_of_rows_broadcast_along_tokens_shift_other_rows() -> None:
    # rows 1, 3 and 5, 9 have the means 2 and 7
    given = numbers([1, 3], [5, 9]), numbers([1, 1], [1, 1])
    assert near(museum.a_row_s_mean_laid_along_tokens(*given), [-1, -4], [3, 2])
    assert near(museum.a_row_s_mean_laid_along_its_row(*given), [-1, 1], [-2, 2])


def test_a_missing_or_doubled_temperature_changes_logprobs() -> None:
    # logits 2, 0 at temperature 0.5: -log(1 + e^-2), -log(1 + e^-4), and -log(1 + e^-8) by applying it twice
    logits, ids = numbers([[2, 0], [0, 0]]), ints([0, 0])
    assert near(museum.no_temperature(logits, ids, 0.5), [-0.12693])
    assert near(museum.the_temperature_once(logits, ids, 0.5), [-0.01815])
    assert near(museum.the_temperature_twice(logits, ids, 0.5), [-0.00034])
    assert math.exp(-0.12693 + 0.01815) == pytest.approx(0.8969, abs=1e-4)  # a ratio that should be 1


def test_a_mask_one_token_off_keeps_another_token_s_logprob() -> None:
    # ids 10 to 13, of which 12 counts: the right mask leaves the logprob of 12, the wrong one that of 13
    logits, ids, mask = torch.randn(1, 4, 14).double(), ints([10, 11, 12, 13]), numbers([0, 0, 1, 0])
    every = logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None])[:, :, 0]  # of 11, 12, 13
    wrong = museum.the_mask_of_the_token_before(logits, ids, mask)
    right = museum.the_mask_of_the_token_that_is_scored(logits, ids, mask)
    assert (wrong != 0).tolist() == [[False, False, True]]
    assert (right != 0).tolist() == [[False, True, False]]
    assert right[0, 1] == every[0, 1]


def test_weights_by_the_count_before_the_selection_change_the_mean() -> None:
    # two parts of two tokens, of which 1 and 2 are selected, with sums 3 and 2: 1/2 * 3 + 1/2 * 1, or 5 / 3
    loss, mask = numbers([3, 9], [1, 1]), numbers([1, 1], [1, 1])
    scores, parts = numbers([3, 0], [2, 1]), [ints(0), ints(1)]
    given = loss, mask, scores, 0.75, parts
    assert near(museum.weighted_by_the_count_before_the_selection(*given).reshape(1), 2.0)
    assert near(museum.tokens_selected_in_the_mini_batch(*given).reshape(1), 5 / 3)


def test_a_selection_in_each_micro_batch_changes_the_selected_tokens() -> None:
    # the highest quarter of 8, 7, 6, 5, 1, 2, 3, 4: 8 and 7 of the whole, 8 and 4 of the halves
    scores, ones = numbers([8, 7, 6, 5], [1, 2, 3, 4]), torch.ones(2, 4).double()
    given = scores, ones, scores, 0.25, [ints(0), ints(1)]
    assert near(museum.tokens_selected_in_the_mini_batch(*given).reshape(1), 7.5)
    assert near(museum.tokens_selected_in_each_micro_batch(*given).reshape(1), 6.0)


def test_the_mean_of_ranks_means_is_not_the_mean_of_all_tokens() -> None:
    # rank 0: 5 tokens of loss 1, rank 1: 1 token of loss 3: (1 + 3) / 2, or 8 / 6
    ranks = [(numbers([1] * 5), numbers([1] * 5)), (numbers([3, 0, 0, 0, 0]), numbers([1, 0, 0, 0, 0]))]
    wrong = torch.stack([museum.the_mean_of_ranks_means(*of) for of in ranks]).mean()
    right = torch.stack([museum.the_mean_of_all_ranks_tokens(*of, torch.tensor(6.0), 2) for of in ranks]).mean()
    assert near(torch.stack([wrong, right]), 2, 8 / 6)


def test_whitening_each_part_of_a_sequence_alone_gives_0() -> None:
    # 0, 4, 4, 0 in two zigzag parts 0, 0 and 4, 4: each is constant, the whole has mean 2 and deviation 2
    part, mask = numbers(0, 0), numbers(1, 1)
    assert near(museum.whitened_on_each_rank_by_itself(part, mask, lambda x: x), 0, 0)
    sums = iter([4.0, 8.0, 16.0])  # counts, entries and squares of both parts
    assert near(museum.whitened_over_all_ranks(part, mask, lambda x: torch.tensor(next(sums))), -1, -1)


def test_product_geometric_mean_and_sum_of_ratios_give_different_losses() -> None:
    # 100 tokens at -0.01: the product e^-1, the geometric mean e^-0.01; two tokens at 0: product 1, sum 2
    new, old, mask, a = numbers([-0.01] * 100), numbers([0] * 100), torch.ones(1, 100).double(), numbers(1)
    assert near(museum.the_product_of_the_ratios(new, old, a, mask, 9.0, 9.0).reshape(1), -0.3679)
    assert near(museum.a_sequence_s_loss_counted_once(new, old, a, mask, 9.0, 9.0).reshape(1), -0.99005)
    two = numbers([0, 0]), numbers([0, 0]), a, numbers([1, 1]), 9.0, 9.0
    assert near(torch.stack([museum.the_product_of_the_ratios(*two), museum.the_sum_of_the_ratios(*two)]), -1, -2)


def test_dividing_by_rows_in_place_of_rollouts_shrinks_the_loss() -> None:
    # a is one row of 2 tokens, b two rows of 1 token, every loss 1: 2 rollouts' means over 3 rows
    mask = numbers([1, 1], [1, 0], [1, 0])
    found = museum.rollouts_means_over_the_number_of_rows(torch.ones(3, 2).double(), mask, ints(0, 1, 1))
    assert near(found.reshape(1), 2 / 3)


def test_nan_times_0_under_the_mask_stays_nan() -> None:
    given = numbers([0, 0]), numbers([0, math.nan]), numbers([1, 1]), numbers([1, 0])
    assert museum.nan_times_0(*given).isnan()
