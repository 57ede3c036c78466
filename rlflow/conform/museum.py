"""Functions with bugs that public threads report: for each bug a wrong function and a right one, of a few lines.

Of each thread an excerpt was read, usually its description. The formulas are what the excerpts describe, not code of
the projects named. `docs/museum.md` tells what each bug does to a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.conform.diagnosis import Diagnosis, Kind, conform

EVERY: list[Exhibit] = []


@dataclass(frozen=True)
class Exhibit:
    """A function, and the verdict that `conform` must give on it.

    Attributes:
        name: Name of the bug; `right` or another word after it.
        call: The function.
        kind: Quantity that the function computes.
        verdict: The verdict that `conform` must give.
        term: The term that is to be named; empty for a right function.
        source: The thread, with its date.
        algorithm: The algorithm that it is compared with.
        options: Options that `conform` is called with.
    """

    name: str
    call: Callable[..., Any]
    kind: Kind
    verdict: str
    term: str
    source: str
    algorithm: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)

    def found(self) -> Diagnosis:
        """The diagnosis that `conform` makes."""
        return conform(self.kind, self.call, self.algorithm, name=self.call.__name__, **self.options)

    def is_named(self, found: Diagnosis) -> bool:
        """Whether this diagnosis is the right one."""
        if self.verdict == "differs":
            return found.verdict == "differs" and self.term in found.terms
        named = not self.term or any(change.term == self.term for change in found.changes)
        noted = self.term and any(self.term in note for note in found.notes)
        return found.verdict in (self.verdict, "conforms") and bool(named or noted) and found.verdict != "differs"


def wrong(kind: Kind, term: str, source: str, algorithm: str = "grpo", **options: Any) -> Callable[[Any], Any]:
    """Mark a function in which the term is wrong."""
    return _exhibit("differs", kind, term, source, algorithm, options)


def convention(kind: Kind, term: str, source: str, algorithm: str = "grpo", **options: Any) -> Callable[[Any], Any]:
    """Mark a function that makes a choice of its own in a term."""
    return _exhibit("convention", kind, term, source, algorithm, options)


def right(kind: Kind, source: str, algorithm: str = "grpo", **options: Any) -> Callable[[Any], Any]:
    """Mark a function in which no term is wrong."""
    return _exhibit("convention", kind, "", source, algorithm, options)


def _exhibit(
    verdict: str, kind: Kind, term: str, source: str, algorithm: str, options: dict[str, Any]
) -> Callable[[Any], Any]:
    def mark(call: Any) -> Any:
        name = call.__name__.replace("_", " ")
        EVERY.append(Exhibit(name, call, kind, verdict, term, source, algorithm, options))
        return call

    return mark


SLIME_2230 = "https://github.com/THUDM/slime/issues/2230 (2026-07-24)"


@wrong("advantages", "group", SLIME_2230, "dr_grpo")
def one_baseline_for_all_prompts(rewards, group):
    return rewards - rewards.mean()


@right("advantages", SLIME_2230, "dr_grpo")
def one_baseline_for_each_prompt(rewards, group):
    return rewards - _over_groups(rewards, group) / _over_groups(torch.ones_like(rewards), group)


def _over_groups(x, group):
    """The sum over the rows of each row's group."""
    ids, index = group.unique(return_inverse=True)
    return x.new_zeros(len(ids)).index_add(0, index, x)[index]


NEMO_4158 = "https://github.com/NVIDIA-NeMo/RL/pull/4158 (2026-09-16)"


def _others(rewards, group):
    """Mean and mean square of the other rewards of each row's group."""
    number = (_over_groups(torch.ones_like(rewards), group) - 1).clamp(min=1)
    mean = (_over_groups(rewards, group) - rewards) / number
    return mean, (_over_groups(rewards.square(), group) - rewards.square()) / number


@wrong("advantages", "normalization", NEMO_4158, "rloo")
def leave_one_out_deviation_by_squares(rewards, group):
    mean, square = _others(rewards, group)
    std = (square - mean.square()).clamp(min=0).sqrt()
    return torch.where(std > 0, (rewards - mean) / (std + 1e-6), rewards - mean)


@right("advantages", NEMO_4158, "rloo")
def leave_one_out_deviation_of_equals_is_0(rewards, group):
    same = (group[:, None] == group) & ~torch.eye(len(group)).bool()
    advantages = []
    for reward, of in zip(rewards, same, strict=True):
        others = rewards[of]
        flat = len(others) == 0 or others.max() == others.min()
        divisor = 1.0 if flat else others.std(unbiased=False) + 1e-6
        advantages.append((reward - others.mean()) / divisor if len(others) else 0 * reward)
    return torch.stack(advantages)


MILES_2378 = "https://github.com/radixark/miles/issues/2378 (2026-08-11)"


@wrong("advantages", "rows of a rollout", MILES_2378, "dr_grpo")
def a_rollout_counted_once_per_row(rewards, group, rollout):
    return rewards - _over_groups(rewards, group) / _over_groups(torch.ones_like(rewards), group)


@right("advantages", MILES_2378, "dr_grpo")
def a_rollout_counted_once(rewards, group, rollout):
    weight = 1 / _over_groups(torch.ones_like(rewards), rollout)
    return rewards - _over_groups(weight * rewards, group) / _over_groups(weight, group)


VERL_6452 = "https://github.com/verl-project/verl/pull/6452 (2026-05-23)"


@wrong("advantages", "baseline of rejected rows", VERL_6452, "dr_grpo")
def a_rejected_sibling_in_the_baseline(rewards, group, mask):
    return rewards - _over_groups(rewards, group) / _over_groups(torch.ones_like(rewards), group)


@right("advantages", VERL_6452, "dr_grpo")
def accepted_siblings_in_the_baseline(rewards, group, mask):
    accepted = (mask.sum(1) > 0).to(rewards.dtype)
    return rewards - _over_groups(accepted * rewards, group) / _over_groups(accepted, group).clamp(min=1)


@convention("advantages", "group of one", VERL_6452, "dr_grpo")
def a_lone_row_keeps_its_reward(rewards, group, mask):
    accepted = (mask.sum(1) > 0).to(rewards.dtype)
    number = _over_groups(accepted, group)
    return rewards - torch.where(number > 1, _over_groups(accepted * rewards, group) / number.clamp(min=1), 0.0)


VERL_7278 = "https://github.com/verl-project/verl/issues/7278 (2026-08-06)"
RETURNS = "reinforce_plus_plus"


@wrong("advantages", "mask", VERL_7278, RETURNS)
def the_return_reset_at_masked_tokens(token_rewards, mask, gamma):
    returns, after = torch.zeros_like(token_rewards), token_rewards.new_zeros(len(token_rewards))
    for t in reversed(range(mask.shape[1])):
        after = (token_rewards[:, t] + gamma * after) * mask[:, t]
        returns[:, t] = after
    return returns


@right("advantages", VERL_7278, RETURNS)
def the_return_carried_over_masked_tokens(token_rewards, mask, gamma):
    return _gae(token_rewards, torch.zeros_like(token_rewards), gamma, 1.0, steps=mask)


MILES_1827 = "https://github.com/radixark/miles/pull/1827 (2026-07-27)"


@wrong("advantages", "mask", MILES_1827, "ppo")
def gae_over_all_tokens(rewards, values, mask, gamma, lam):
    token_rewards = torch.zeros_like(values)
    token_rewards[:, -1] = rewards
    return _gae(token_rewards, values * mask, gamma, lam)


@right("advantages", MILES_1827, "ppo")
def gae_over_the_tokens_that_count(rewards, values, mask, gamma, lam):
    last = (mask != 0) & (mask.flip(1).cumsum(1).flip(1) == 1)
    return _gae(rewards[:, None] * last, values * mask, gamma, lam, steps=mask)


def _gae(rewards, values, gamma, lam, steps=None):
    """Generalized advantage estimation over the steps, which are all tokens unless it is said."""
    counts = torch.ones_like(values) if steps is None else steps
    advantages, after, value = torch.zeros_like(values), values.new_zeros(len(values)), values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        here = rewards[:, t] + gamma * value - values[:, t] + gamma * lam * after
        after = torch.where(counts[:, t] != 0, here, after)
        value = torch.where(counts[:, t] != 0, values[:, t], value)
        advantages[:, t] = after
    return advantages


ROLL_447 = "https://github.com/alibaba/ROLL/pull/447 (2026-05-20)"


@wrong("advantages", "mask", ROLL_447, "ppo", settings={"gamma": 1.0})
def values_of_masked_slots_bootstrapped(token_rewards, values, mask, lam):
    return _gae(token_rewards * mask, values, 1.0, lam)


@right("advantages", ROLL_447, "ppo", settings={"gamma": 1.0})
def values_of_masked_slots_left_out(token_rewards, values, mask, lam):
    return _gae(token_rewards * mask, values * mask, 1.0, lam, steps=mask)


TRL_7024 = "https://github.com/huggingface/trl/issues/7024 (2026-09-02)"


@wrong("advantages", "mask", TRL_7024, RETURNS)
def a_mask_from_ids_that_are_never_minus_100(token_rewards, ids, labels, gamma):
    return _gae(token_rewards * (ids != -100), torch.zeros_like(token_rewards), gamma, 1.0)


@right("advantages", TRL_7024, RETURNS)
def a_mask_from_labels(token_rewards, ids, labels, gamma):
    return _gae(token_rewards, torch.zeros_like(token_rewards), gamma, 1.0, steps=labels != -100)


VERL_2506 = "https://github.com/verl-project/verl/issues/2506 (2025-07-13)"


def _clipped(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


@wrong("loss", "mask", VERL_2506)
def advantages_in_place_of_the_mask(logprobs, old_logprobs, advantages, mask):
    loss = _clipped(logprobs, old_logprobs, advantages)
    return (loss * advantages).sum() / advantages.sum()


@right("loss", VERL_2506)
def the_mask_in_its_place(logprobs, old_logprobs, advantages, mask):
    return (_clipped(logprobs, old_logprobs, advantages) * mask).sum() / mask.sum()


VERL_179 = "https://github.com/verl-project/verl/pull/179 (2025-02-01)"


def _k3(logprobs, ref_logprobs):
    return (ref_logprobs - logprobs).exp() - 1 - (ref_logprobs - logprobs)


@wrong("loss", "sign of KL", VERL_179)
def kl_subtracted(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef):
    loss = _clipped(logprobs, old_logprobs, advantages) - kl_coef * _k3(logprobs, ref_logprobs)
    return (loss * mask).sum() / mask.sum()


@right("loss", VERL_179)
def kl_added(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef):
    loss = _clipped(logprobs, old_logprobs, advantages) + kl_coef * _k3(logprobs, ref_logprobs)
    return (loss * mask).sum() / mask.sum()


TRL_3823 = "https://github.com/huggingface/trl/issues/3823 (2025-07-31)"


def _sequence_loss(logprobs, old_logprobs, advantages, mask, low, high):
    """`[B, 1]`, GSPO's loss of each sequence."""
    ratio = (((logprobs - old_logprobs) * mask).sum(1) / mask.sum(1)).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)[:, None]


@wrong("loss", "denominator", TRL_3823, "gspo")
def a_sequence_s_loss_weighted_by_its_length(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    loss = _sequence_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return (loss * mask).sum() / mask.sum()


@right("loss", TRL_3823, "gspo")
def a_sequence_s_loss_counted_once(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    return _sequence_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high).mean()


OPENRLHF_1250 = "https://github.com/OpenRLHF/OpenRLHF/pull/1250 (2026-06-09)"


@wrong("normalization", "group", OPENRLHF_1250)
def a_row_s_mean_laid_along_tokens(x, mask):
    mean = (x * mask).sum(1) / mask.sum(1)
    return x - mean


@right("normalization", OPENRLHF_1250)
def a_row_s_mean_laid_along_its_row(x, mask):
    mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return x - mean


TRL_3029 = "https://github.com/huggingface/trl/pull/3029 (2025-03-08)"


def _gathered(logits, ids):
    return logits[:, :-1].log_softmax(2).gather(2, ids[:, 1:, None])[:, :, 0]


@wrong("logprobs", "temperature", TRL_3029)
def no_temperature(logits, ids, temperature):
    return _gathered(logits, ids)


@wrong("logprobs", "temperature", "https://github.com/huggingface/trl/issues/4159 (2025-09-28)")
def the_temperature_twice(logits, ids, temperature):
    return _gathered(logits / temperature / temperature, ids)


@right("logprobs", TRL_3029)
def the_temperature_once(logits, ids, temperature):
    return _gathered(logits / temperature, ids)


TRL_6800 = "https://github.com/huggingface/trl/issues/6800 (2026-08)"


@wrong("logprobs", "position ids", TRL_6800)
def positions_that_count_padding(model, ids, attention_mask, temperature):
    return _gathered(model(ids, attention_mask).logits / temperature, ids)


@right("logprobs", TRL_6800)
def positions_of_tokens_alone(model, ids, attention_mask, temperature):
    positions = (attention_mask.cumsum(1) - attention_mask).clamp(min=0)
    return _gathered(model(ids, attention_mask, position_ids=positions).logits / temperature, ids)


MLX_80 = "https://github.com/Goekdeniz-Guelmez/mlx-lm-lora/issues/80 (2026-08-23)"


@wrong("logprobs", "mask", MLX_80)
def the_mask_of_the_token_before(logits, ids, mask):
    return _gathered(logits, ids) * mask[:, :-1]


@right("logprobs", MLX_80)
def the_mask_of_the_token_that_is_scored(logits, ids, mask):
    return _gathered(logits, ids) * mask[:, 1:]


VERL_7200 = "https://github.com/verl-project/verl/issues/7200 (2026-07-30)"


@wrong("loss", "denominator of micro-batches", VERL_7200, micro="sum")
def one_term_by_the_count_of_its_micro_batch(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef, total_tokens
):
    surrogate = (_clipped(logprobs, old_logprobs, advantages) * mask).sum() / total_tokens
    return surrogate + kl_coef * (_k3(logprobs, ref_logprobs) * mask).sum() / mask.sum()


@wrong("loss", "KL estimator", "https://github.com/NVIDIA-NeMo/RL/issues/3792 (2026-08)", micro="sum")
def a_term_that_was_never_wired(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef, total_tokens):
    return (_clipped(logprobs, old_logprobs, advantages) * mask).sum() / total_tokens


@right("loss", VERL_7200, micro="sum")
def all_terms_by_the_count_of_the_batch(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef, total_tokens):
    loss = _clipped(logprobs, old_logprobs, advantages) + kl_coef * _k3(logprobs, ref_logprobs)
    return (loss * mask).sum() / total_tokens


AREAL_1730 = "https://github.com/areal-project/AReaL/issues/1730 (2026-09-18)"


def _highest(scores, mask, share):
    number = max(1, round(share * float(mask.sum())))
    lowest = scores.where(mask != 0, -torch.inf).flatten().topk(number).values[-1]
    return mask * (scores >= lowest)


@wrong("aggregation", "selection", AREAL_1730)
def tokens_selected_in_each_micro_batch(loss, mask, scores, share, parts):
    chosen = torch.cat([_highest(scores[rows], mask[rows], share) for rows in parts])
    return (loss[torch.cat(list(parts))] * chosen).sum() / chosen.sum()


@wrong("aggregation", "denominator of micro-batches", AREAL_1730)
def weighted_by_the_count_before_the_selection(loss, mask, scores, share, parts):
    chosen = _highest(scores, mask, share)
    means = [(loss[rows] * chosen[rows]).sum() / chosen[rows].sum().clamp(min=1) for rows in parts]
    shares = [mask[rows].sum() / mask.sum() for rows in parts]
    return sum((mean * of for mean, of in zip(means, shares, strict=True)), loss.new_zeros(()))


@right("aggregation", AREAL_1730)
def tokens_selected_in_the_mini_batch(loss, mask, scores, share, parts):
    chosen = _highest(scores, mask, share)
    return sum(((loss[rows] * chosen[rows]).sum() for rows in parts), loss.new_zeros(())) / chosen.sum()


PRIME_2562 = "https://github.com/PrimeIntellect-ai/prime-rl/pull/2562 (2026-05-19)"


@wrong("aggregation", "denominator of ranks", PRIME_2562, ranks="mean")
def the_mean_of_ranks_means(loss, mask):
    return (loss * mask).sum() / mask.sum()


@right("aggregation", PRIME_2562, ranks="mean")
def the_mean_of_all_ranks_tokens(loss, mask, total_tokens, world_size):
    return (loss * mask).sum() / total_tokens * world_size


SLIME_2235 = "https://github.com/THUDM/slime/pull/2235 (2026-07-26)"


@wrong("normalization", "group", SLIME_2235)
def whitened_on_each_rank_by_itself(x, mask, reduce):
    mean = (x * mask).sum() / mask.sum()
    variance = ((x - mean).square() * mask).sum() / mask.sum()
    return (x - mean) / torch.where(variance > 0, variance.sqrt(), 1.0)


@right("normalization", SLIME_2235)
def whitened_over_all_ranks(x, mask, reduce):
    count = reduce(mask.sum())
    mean = reduce((x * mask).sum()) / count
    variance = reduce(((x - mean).square() * mask).sum()) / count
    return (x - mean) / torch.where(variance > 0, variance.sqrt(), 1.0)


SKYRL_1420 = "https://github.com/NovaSky-AI/SkyRL/pull/1420 (2026-03-31)"


@wrong("aggregation", "denominator of ranks", SKYRL_1420, ranks="mean")
def a_sum_averaged_over_ranks(loss, mask, total_tokens):
    return (loss * mask).sum() / total_tokens


@wrong("aggregation", "denominator of ranks", SKYRL_1420, ranks="sum")
def a_mean_multiplied_by_the_ranks(loss, mask, total_tokens, world_size):
    return (loss * mask).sum() / total_tokens * world_size


# Contested: each side has its reasons, so a convention is named.
AGENT_593 = "https://github.com/microsoft/agent-lightning/issues/593 (2026-09)"
TRL_5814 = "https://github.com/huggingface/trl/issues/5814 (2026-05-22)"
TRL_2995 = "https://github.com/huggingface/trl/issues/2995 (2025-03)"
VERL_2953 = "https://github.com/verl-project/verl/pull/2953 (2025-08-07)"
TRL_3750 = "https://github.com/huggingface/trl/issues/3750 (2026-06-23)"
OPENRLHF_1240 = "https://github.com/OpenRLHF/OpenRLHF/issues/1240"


@convention("loss", "ratio", TRL_5814, "gspo")
def the_product_of_the_ratios(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    ratio = ((logprobs - old_logprobs) * mask).sum(1).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()


@wrong("loss", "ratio", "https://github.com/unslothai/unsloth-zoo/pull/870", "gspo")
def the_sum_of_the_ratios(logprobs, old_logprobs, advantages, mask, clip_low, clip_high):
    ratio = ((logprobs - old_logprobs).exp() * mask).sum(1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages).mean()


@convention("aggregation", "denominator", TRL_2995)
def the_mean_of_rows_means(loss, mask):
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@convention("aggregation", "denominator", AGENT_593)
def rollouts_means_over_the_number_of_rows(loss, mask, rollout):
    summed, counted = _over_groups((loss * mask).sum(1), rollout), _over_groups(mask.sum(1), rollout)
    rows = _over_groups(torch.ones_like(summed), rollout)
    return (summed / counted / rows).sum() / len(loss)


@convention("loss", "KL estimator", VERL_2953)
def k2_in_the_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, kl_coef):
    loss = _clipped(logprobs, old_logprobs, advantages) + kl_coef * (logprobs - ref_logprobs).square() / 2
    return (loss * mask).sum() / mask.sum()


@convention("advantages", "position", TRL_3750, "ppo")
def the_score_on_the_first_pad(rewards, values, mask, gamma, lam):
    rows = torch.arange(len(mask))
    after = ((mask * torch.arange(mask.shape[1])).amax(1).long() + 1).clamp(max=mask.shape[1] - 1)
    token_rewards, steps = torch.zeros_like(values), mask.clone()
    token_rewards[rows, after], steps[rows, after] = rewards, 1.0
    return _gae(token_rewards, values * mask, gamma, lam, steps)


@convention("loss", "NaN under the mask", OPENRLHF_1240)
def nan_times_0(logprobs, old_logprobs, advantages, mask):
    return (_clipped(logprobs, old_logprobs, advantages) * mask).sum() / mask.sum()


# False alarms: the threads end in the reporter's or the maintainers' word that the code is right.
DEEPSPEED_741 = "https://github.com/deepspeedai/DeepSpeedExamples/issues/741"
TRL_3452 = "https://github.com/huggingface/trl/issues/3452"


@right("logprobs", DEEPSPEED_741)
def a_mask_shifted_with_its_targets(logits, ids, mask):
    first = int((mask != 0).any(0).nonzero()[0]) - 1  # the prompt's last token scores the first that counts
    logprobs, counts = _gathered(logits, ids), mask[:, 1:]
    return torch.cat([torch.zeros_like(logprobs[:, :first]), (logprobs * counts)[:, first:]], dim=1)


@right("loss", TRL_3452)
def a_loss_of_0_on_policy(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
