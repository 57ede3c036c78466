"""Functions with the signatures of verl and TRL, and errors that are not in the museum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlflow.conform.diagnosis import Kind, conform
from tests.slow import slow_but


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask) * mask.sum() / (mask.sum() - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8)


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    if loss_agg_mode == "token-mean":
        return masked_mean(loss_mat, loss_mask)
    return ((loss_mat * loss_mask).sum(-1) / (loss_mask.sum(-1) + 1e-8)).mean()


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    kept = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = torch.maximum(-advantages * ratio, -advantages * kept)
    cut = torch.min(-advantages * config.get("clip_ratio_c", 3.0), loss)
    return agg_loss(torch.where(advantages < 0, cut, loss), response_mask, loss_agg_mode), {}


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, epsilon: float = 1e-6, config: Any = None
) -> tuple[Tensor, Tensor]:
    scores, groups = token_level_rewards.sum(-1), defaultdict(list)
    for score, name in zip(scores.tolist(), index, strict=True):
        groups[name].append(score)
    rows = []
    for score, name in zip(scores.tolist(), index, strict=True):
        of = torch.tensor(groups[name], dtype=scores.dtype)
        mean, std = (of.mean(), of.std()) if len(of) > 1 else (torch.tensor(0.0), torch.tensor(1.0))
        rows.append((score - mean) / (std + epsilon))
    advantages = torch.stack(rows)[:, None] * response_mask
    return advantages, advantages


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    last: Any = 0.0
    next_values: Any = 0.0
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        delta = token_level_rewards[:, t] + gamma * next_values - values[:, t]
        here, counts = delta + gamma * lam * last, response_mask[:, t]
        next_values = values[:, t] * counts + (1 - counts) * next_values
        last = here * counts + (1 - counts) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return masked_whiten(advantages, response_mask), advantages + values


def of_trl(
    per_token_logps: Tensor,
    old_per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    beta: float,
) -> Tensor:
    gap = ref_per_token_logps - per_token_logps
    ratio = (per_token_logps - old_per_token_logps).exp()
    loss = -torch.min(ratio * advantages.unsqueeze(1), ratio.clamp(0.8, 1.2) * advantages.unsqueeze(1))
    loss = loss + beta * (gap.exp() - gap - 1)
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1)).mean()


def by_view(rewards: Tensor, num_generations: int) -> Tensor:
    groups = rewards.view(-1, num_generations)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def data_parallel(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, total_tokens: Tensor, world_size: int
) -> Tensor:
    return (surrogate(logprobs, old_logprobs, advantages) * mask).sum() * world_size / total_tokens


def surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def per_token(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return surrogate(logprobs, old_logprobs, advantages)


def cross_entropy(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    flat = (logits[:, :-1] / temperature).flatten(0, 1)
    return -torch.nn.functional.cross_entropy(flat, ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def by_entries(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return surrogate(logprobs, old_logprobs, advantages)[mask].mean()


RIGHT: list[tuple[Kind, Callable[..., Any], str, dict[str, Any], set[str]]] = [
    ("loss", compute_policy_loss, "grpo", {}, {"dual clip"}),
    ("loss", of_trl, "grpo", {"settings": {"kl_coef": 0.04}}, {"denominator"}),
    ("loss", data_parallel, "grpo", {"micro": "sum", "ranks": "mean"}, set()),
    ("loss", per_token, "grpo", {}, set()),
    ("loss", by_entries, "grpo", {}, set()),  # which needs a bool mask
    ("aggregation", agg_loss, "grpo", {}, set()),
    ("normalization", masked_whiten, "grpo", {}, set()),
    ("advantages", compute_grpo_outcome_advantage, "grpo", {}, {"group of one"}),
    ("advantages", compute_gae_advantage_return, "ppo", {}, {"normalization"}),
    ("advantages", by_view, "grpo", {}, {"epsilon"}),
    ("logprobs", cross_entropy, "grpo", {}, set()),
]


@pytest.mark.parametrize(("kind", "function", "algorithm", "options", "conventions"), RIGHT)
def test_a_right_function_has_conventions_at_most(
    kind: Kind, function: Callable[..., Any], algorithm: str, options: dict[str, Any], conventions: set[str]
) -> None:
    found = conform(kind, function, algorithm, **options)
    assert (found.verdict != "differs", {change.term for change in found.changes}) == (True, conventions), found


@pytest.mark.parametrize("setting", ["eps", "epsilon"])
def test_a_number_set_for_the_divisor_reaches_advantages_with_or_without_a_default(setting: str) -> None:
    seen = set()

    def with_default(rewards: Tensor, group: Tensor, epsilon: float = 1e-4) -> Tensor:
        seen.add(epsilon)
        return rewards

    def without(rewards: Tensor, group: Tensor, eps: float) -> Tensor:
        return with_default(rewards, group, eps)

    for function in (with_default, without):
        conform("advantages", function, settings={setting: 0.01})
    assert seen == {0.01}


def inverse(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(surrogate(old_logprobs, logprobs, advantages), mask)


def unmasked(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return surrogate(logprobs, old_logprobs, advantages).mean()


def padded(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (surrogate(logprobs, old_logprobs, advantages) * mask).mean(1).mean()


def halved(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return 0.5 * masked_mean(surrogate(logprobs, old_logprobs, advantages), mask)


def to_itself(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(surrogate(logprobs, logprobs.detach(), advantages), mask)


def half_the_range(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    kept = ratio.clamp(1 - clip_low / 2, 1 + clip_high / 2)
    return masked_mean(-torch.min(ratio * advantages, kept * advantages), mask)


def unmasked_kl(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    gap = ref_logprobs - logprobs
    return masked_mean(surrogate(logprobs, old_logprobs, advantages), mask) + kl_coef * (gap.exp() - 1 - gap).mean()


def k1(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    return masked_mean(surrogate(logprobs, old_logprobs, advantages) + kl_coef * (logprobs - ref_logprobs), mask)


def accumulated(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, parts: Sequence[Tensor]
) -> Tensor:
    losses = [masked_mean(surrogate(logprobs[i], old_logprobs[i], advantages[i]), mask[i]) for i in parts]
    return torch.stack(losses).mean()


def in_chunks(rewards: Tensor, group: Tensor) -> Tensor:
    size = int((group == group[0]).sum())
    rows = torch.arange(len(rewards)) // size
    same = (rows[:, None] == rows).to(rewards.dtype)
    return rewards - same @ rewards / same.sum(1)


def a_constant_in_the_divisor(rewards: Tensor, group: Tensor) -> Tensor:
    rows = [rewards[group == each] for each in group]
    return torch.stack([(r - of.mean()) / (of.std() + 1) for r, of in zip(rewards, rows, strict=True)])


def of_the_batch_s_best(rewards: Tensor, group: Tensor) -> Tensor:
    return rewards - rewards.cummax(0).values


def after_the_softmax(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return cross_entropy(logits, ids, 1.0) / temperature


def not_shifted(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1)[:, 1:].gather(2, ids[:, 1:, None])[..., 0]


def padding_attended_to(model: Any, ids: Tensor, attention_mask: Tensor, temperature: float) -> Tensor:
    return cross_entropy(model(ids, None, (attention_mask.cumsum(1) - 1).clamp(min=0)).logits, ids, temperature)


def whitened_without_a_mask(x: Tensor, mask: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def by_the_longest_row(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / (mask.sum(1).max() * len(mask))


def by_a_root(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum() / mask.sum().sqrt()


WRONG: list[tuple[Kind, Callable[..., Any], str, str]] = [
    ("loss", inverse, "grpo", "ratio"),
    ("loss", unmasked, "grpo", "mask"),
    ("loss", padded, "grpo", "denominator"),
    ("loss", halved, "grpo", "denominator"),
    ("loss", to_itself, "grpo", "ratio"),
    ("loss", half_the_range, "grpo", "clip"),
    ("loss", unmasked_kl, "grpo", "denominator of KL"),
    ("loss", k1, "grpo", "KL estimator"),
    ("loss", accumulated, "grpo", "denominator of micro-batches"),
    ("advantages", in_chunks, "dr_grpo", "group"),
    ("advantages", a_constant_in_the_divisor, "grpo", "normalization"),
    ("advantages", of_the_batch_s_best, "dr_grpo", "baseline"),
    ("logprobs", after_the_softmax, "grpo", "temperature"),
    ("logprobs", not_shifted, "grpo", "position"),
    ("logprobs", padding_attended_to, "grpo", "padding"),
    ("normalization", whitened_without_a_mask, "grpo", "mask"),
    ("aggregation", by_the_longest_row, "grpo", "denominator"),
    ("aggregation", by_a_root, "grpo", "denominator"),
]
FAST = [each for each in WRONG if each[0] in ("logprobs", "normalization") or each[1] in (unmasked, accumulated)]


@pytest.mark.parametrize(("kind", "function", "algorithm", "term"), slow_but(FAST, WRONG))
def test_a_wrong_function_is_named_by_its_term(
    kind: Kind, function: Callable[..., Any], algorithm: str, term: str
) -> None:
    found = conform(kind, function, algorithm)
    assert found.verdict == "differs"
    assert term in found.terms, found


def test_a_difference_that_no_change_explains_is_shown_by_its_cases_and_numbers() -> None:
    found = conform("aggregation", by_a_root)
    assert [case for case, _, _ in found.unexplained] or found.changes[0].text.startswith("cases are")
    assert found.verdict == "differs"


def test_parts_that_a_function_leaves_to_its_caller_are_a_note() -> None:
    (note,) = conform("aggregation", agg_loss).notes
    assert note.startswith("its value on the whole batch is neither the sum nor the mean")


def test_ranks_that_do_not_meet_are_an_error_and_no_hang() -> None:
    def uneven(x: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        total = reduce(x.sum())
        return x - (reduce(total) if float(x.sum()) > 3 else total)  # parts with the sums 0.5 and 9

    assert "the same number of times" in str(conform("normalization", uneven))
