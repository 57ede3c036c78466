"""Errors of the museum's kinds that are not in it, and right functions in unusual forms."""

from __future__ import annotations

import pytest
import torch

from rlflow.conform.diagnosis import conform
from tests.slow import slow_but

# Parameters' names say what they are, so they have no types here.


def clipped(logprobs, old_logprobs, advantages, low=0.2, high=0.2):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def mean(x, mask):
    return (x * mask).sum() / mask.sum()


def double_mean(logprobs, old_logprobs, advantages, mask):
    loss = clipped(logprobs, old_logprobs, advantages)
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean() / len(loss)


def prompt_in_lengths(logprobs, old_logprobs, advantages, mask):
    loss = clipped(logprobs, old_logprobs, advantages)
    return ((loss * mask).sum(1) / (mask.sum(1) + 3)).mean()


def clamp_of_the_product(logprobs, old_logprobs, advantages, mask):
    product = (logprobs - old_logprobs).exp() * advantages
    return -mean(torch.clamp(product, 0.8 * advantages, 1.2 * advantages), mask)


def wrong_side_for_losses(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    return -mean(torch.where(advantages > 0, ratio.clamp(max=1.2), ratio.clamp(max=0.8)) * advantages, mask)


def ranges_swapped(logprobs, old_logprobs, advantages, mask, eps_low, eps_high):
    return mean(clipped(logprobs, old_logprobs, advantages, eps_high, eps_low), mask)


def old_one_token_late(logprobs, old_logprobs, advantages, mask):
    return mean(clipped(logprobs, old_logprobs.roll(1, 1), advantages), mask)


def no_exp(logprobs, old_logprobs, advantages, mask):
    log_ratio = logprobs - old_logprobs
    return -mean(torch.min(log_ratio * advantages, log_ratio.clamp(-0.2, 0.2) * advantages), mask)


def without_a_gradient(logprobs, old_logprobs, advantages, mask):
    return mean(clipped(logprobs, logprobs, advantages), mask)


def gradient_through_the_weight(logprobs, old_logprobs, advantages, mask, clip_high):
    return -mean((logprobs - old_logprobs).exp().clamp(max=1 + clip_high) * advantages * logprobs, mask)


def k3_without_its_1(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef):
    gap = ref_logprobs - logprobs
    return mean(clipped(logprobs, old_logprobs, advantages) + kl_coef * (gap.exp() - gap), mask)


def corrected_by_the_new_policy(logprobs, old_logprobs, rollout_logprobs, advantages, mask):
    weights = (logprobs - rollout_logprobs).exp().clamp(max=2.0).detach()
    return mean(clipped(logprobs, old_logprobs, advantages) * weights, mask)


def weighted_by_length_twice(loss, mask):
    lengths = mask.sum(1)
    return ((loss * mask).sum(1) * lengths).sum() / lengths.square().sum()


def in_groups(rewards, group, of_group):
    advantages = torch.zeros_like(rewards)
    for each in group.unique():
        advantages[group == each] = of_group(rewards[group == each])
    return advantages


def group_in_halves(rewards, group):
    return in_groups(
        rewards, group, lambda r: torch.cat([half - half.mean() for half in r.split(max(1, (len(r) + 1) // 2))])
    )


def others_over_n(rewards, group):
    return in_groups(rewards, group, lambda r: r - (r.sum() - r) / len(r))


def divisor_of_1_at_least(rewards, group):
    return in_groups(rewards, group, lambda r: (r - r.mean()) / r.std().clamp(min=1.0) if len(r) > 1 else 0 * r)


def of_the_wrong_axis(rewards, num_generations):
    groups = rewards.view(num_generations, -1)
    return ((groups - groups.mean(0)) / (groups.std(0) + 1e-6)).flatten()


def gae(rewards, values, mask, difference, decay, all_rows=False):
    advantages, last, after = torch.zeros_like(values), 0.0, 0.0
    for row in reversed(range(len(values))):
        last, after = (last, after) if all_rows else (0.0, 0.0)
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            last = difference(rewards[row, t], after, values[row, t]) + decay * last
            after, advantages[row, t] = values[row, t], last
    return advantages


def done_ignored(token_rewards, values, mask, gamma, lam):
    return gae(token_rewards, values, mask, lambda r, after, v: r + gamma * after - v, gamma * lam, all_rows=True)


def lambda_in_the_difference(token_rewards, values, mask, gamma, lam):
    return gae(token_rewards, values, mask, lambda r, after, v: r + gamma * lam * after - v, gamma * lam)


def gamma_and_lambda_swapped(token_rewards, values, mask, gamma, lam):
    return gae(token_rewards, values, mask, lambda r, after, v: r + lam * after - v, gamma * lam)


def deviation_without_the_mask(x, mask):
    centred = x - mean(x, mask)
    return centred / centred.square().mean().sqrt()


def softmax_over_time(logits, ids, temperature):
    return (logits[:, :-1] / temperature).log_softmax(1).gather(2, ids[:, 1:, None])[..., 0]


def temperature_above_alone(logits, ids, temperature):
    chosen = logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return chosen / temperature - logits[:, :-1].logsumexp(2)


WRONG = [
    ("loss", double_mean, "grpo", "denominator"),
    ("loss", prompt_in_lengths, "grpo", "denominator"),
    ("loss", clamp_of_the_product, "grpo", "clip"),
    ("loss", wrong_side_for_losses, "grpo", "clip"),
    ("loss", ranges_swapped, "grpo", "clip"),
    ("loss", old_one_token_late, "grpo", "position"),
    ("loss", no_exp, "grpo", "ratio"),
    ("loss", without_a_gradient, "grpo", "ratio"),
    ("loss", gradient_through_the_weight, "cispo", "ratio"),
    ("loss", k3_without_its_1, "grpo", "KL estimator"),
    ("loss", corrected_by_the_new_policy, "grpo", "importance weights"),
    ("aggregation", weighted_by_length_twice, "grpo", "denominator"),
    ("advantages", group_in_halves, "dr_grpo", "group"),
    ("advantages", others_over_n, "rloo", "baseline"),
    ("advantages", divisor_of_1_at_least, "grpo", "normalization"),
    ("advantages", of_the_wrong_axis, "grpo", "group"),
    ("advantages", done_ignored, "ppo", "bootstrap"),
    ("advantages", lambda_in_the_difference, "ppo", "discount"),
    ("advantages", gamma_and_lambda_swapped, "ppo", "discount"),
    ("normalization", deviation_without_the_mask, "grpo", "mask"),
    ("logprobs", softmax_over_time, "grpo", "normalization"),
    ("logprobs", temperature_above_alone, "grpo", "temperature"),
]
FAST = [each for each in WRONG if each[0] in ("normalization", "logprobs")]
FAST += [each for each in WRONG if each[1] in (old_one_token_late, done_ignored, divisor_of_1_at_least)]


@pytest.mark.parametrize(("kind", "function", "algorithm", "term"), slow_but(FAST, WRONG))
def test_a_wrong_function_is_named_by_one_term(kind, function, algorithm, term) -> None:
    found = conform(kind, function, algorithm)
    assert (found.verdict, found.terms) == ("differs", {term}), found


def token_mean_of_two_means(loss, mask):
    return (loss * mask).mean() / mask.mean()


def one_side_each(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    return -mean(torch.where(advantages >= 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8)) * advantages, mask)


def k3_by_expm1(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef):
    gap = ref_logprobs - logprobs
    return mean(clipped(logprobs, old_logprobs, advantages) + kl_coef * (gap.expm1() - gap), mask)


def of_pairs(rewards, group):
    def advantages(r):
        apart = r[:, None] - r
        return apart.mean(1) / (apart.square().sum() / (2 * len(r) * max(1, len(r) - 1))).sqrt().add(1e-6)

    return in_groups(rewards, group, advantages)


def leave_one_out_by_scale(rewards, group):
    return in_groups(rewards, group, lambda r: (r - r.mean()) * len(r) / max(1, len(r) - 1))


def logsumexp(logits, ids, temperature):
    scaled = logits[:, :-1] / temperature
    return scaled.gather(2, ids[:, 1:, None])[..., 0] - scaled.logsumexp(2)


RIGHT = [
    ("aggregation", token_mean_of_two_means, "grpo"),
    ("loss", one_side_each, "grpo"),
    ("loss", k3_by_expm1, "grpo"),
    ("advantages", of_pairs, "grpo"),
    ("advantages", leave_one_out_by_scale, "rloo"),
    ("logprobs", logsumexp, "grpo"),
]


@pytest.mark.parametrize(("kind", "function", "algorithm"), RIGHT)
def test_a_right_function_in_an_unusual_form_conforms(kind, function, algorithm) -> None:
    assert conform(kind, function, algorithm).verdict == "conforms"
