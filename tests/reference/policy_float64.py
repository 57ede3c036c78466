"""One update of a policy by its own samples: any advantage with any surrogate, KL and entropy terms, and PPO's critic.

The parts are those of the papers, in `advantages_float64` and `surrogates_float64`; here they are put together over
the samples of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.reference import advantages_float64 as worth
from tests.reference import surrogates_float64 as surrogates
from tests.reference.papers import deepseek_v32, dppo, maxrl, sapo
from tests.reference.sample import Sample
from tests.reference.update import (
    DEFAULT_STEP,
    Step,
    Update,
    load_classifier_float64,
    load_float64,
    mean_loss,
    one_update,
    response_logprobs,
    response_score,
    response_scores,
    response_values,
)


@dataclass(frozen=True)
class Objective:
    """Settings of the loss, named as in the algorithms.

    Attributes:
        advantages: `grpo`, `dr_grpo`, `rloo`, `opo`, `gpg`, `gdpo`, `maxrl`, `cpgd` (with the weight of its filter),
            `remax`, `reinforce++`, `reinforce++ baseline`, `gae`, `distillation` or `minillm`.
        surrogate: `ppo`, `policy gradient`, `importance sampled`, `cispo`, `cpgd`, `gspo`, `gmpo`, `sapo`, `dppo` or
            `off-policy sequence masking`.
        eps: Added to the deviation in GRPO's advantages.
        clip_low: Lower clip range of the ratio.
        clip_high: Upper clip range of the ratio.
        dual_clip: Bound of the ratio where the advantage is negative; None is off.
        drift_coef: Weight of CPGD's drift.
        anchor: Policy whose logprobs stand below the ratio: the `old` policy, or that of the `rollout`.
        tau_pos: Temperature of SAPO for positive advantages.
        tau_neg: Temperature of SAPO for negative advantages.
        delta: Threshold of DPPO and of off-policy sequence masking.
        part_weights: Weights of GDPO, whose parts are the reward and whether it is above 1.
        drift_clip: The largest gradient of it.
        weight_cap: The largest weight of its filter.
        kl_coef: Weight of the divergence from the reference.
        kl_kind: Estimator, as in `surrogates_float64.divergence`.
        kl_in_reward: The divergence of the old policy is taken off the reward, instead of standing in the loss.
        entropy_coef: Weight of the entropy.
        importance_level: Level, as in `surrogates_float64.importance`.
        importance_mode: Mode, as there.
        importance_low: Lower bound, as there.
        importance_high: Upper bound, as there.
        overlong_buffer: Tokens before `max_response_length` over which DAPO's penalty grows; None is off.
        mask_truncated: Leave responses that did not end by themselves out of the loss, not out of their group.
        reward_model_coef: Weight of the reward model's score.
        gamma: Discount.
        lam: Decay of the advantage estimation.
        critic_lam: Decay of the estimation of the critic's targets.
        critic_loss_aggregation: Mode of `mean_loss` for the critic.
        value_clip: Clip range of the critic's values; None is off.
        bootstrap: Take the critic's value after a response that did not end by itself; else 0.
        loss_aggregation: Mode of `mean_loss`.
        max_response_length: The divisor of the `constant` aggregation.
        temperature: Temperature of sampling.
        by_turn: Turns of conversations have advantages, of what was given from each on.
    """

    advantages: str = "grpo"
    surrogate: str = "ppo"
    eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    drift_coef: float = 0.0
    anchor: str = "old"
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    delta: float = 99.0
    part_weights: tuple[float, float] = (1.0, 1.0)
    drift_clip: float = 2.0
    weight_cap: float = 3.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    kl_in_reward: bool = False
    entropy_coef: float = 0.0
    importance_level: str = "token"
    importance_mode: str = "truncate"
    importance_low: float = 0.5
    importance_high: float = 2.0
    overlong_buffer: int | None = None
    mask_truncated: bool = False
    reward_model_coef: float = 1.0
    gamma: float = 1.0
    lam: float = 0.95
    critic_lam: float = 1.0
    critic_loss_aggregation: str = "token-mean"
    value_clip: float | None = 0.2
    bootstrap: bool = False
    loss_aggregation: str = "token-mean"
    max_response_length: int | None = None
    temperature: float = 1.0
    by_turn: bool = False


@dataclass(frozen=True)
class Folders:
    """Models in Hugging Face form.

    Attributes:
        reference: The policy that a divergence is taken from, or the teacher of a distillation.
        reward_model: Model whose score is added to the reward.
        critic: Critic of PPO.
    """

    reference: Path | None = None
    reward_model: Path | None = None
    critic: Path | None = None


@dataclass(frozen=True)
class Scored:
    """A sample before the update: its tokens that count, with their scores.

    Attributes:
        sample: Sample as recorded.
        counted: The positions of those tokens.
        reward: Reward of the whole response.
        new: Logprobs of the policy in training, with a gradient.
        entropy: Entropy of its distribution at each token, with a gradient.
        old: Logprobs of the old policy.
        ref: Logprobs of the reference; None without one.
        rewards: Rewards of each token; their sum is the reward less the penalties.
    """

    sample: Sample
    counted: list[int]
    reward: float
    new: list[Tensor]
    entropy: list[Tensor]
    old: list[float]
    ref: list[float] | None
    rewards: list[float]


def policy_update(
    folder: str | Path,
    samples: Sequence[Sample],
    objective: Objective = Objective(),
    step: Step = DEFAULT_STEP,
    folders: Folders = Folders(),
) -> Update:
    """The loss of all samples as one batch, its gradient, and the weights after one step.

    Args:
        folder: The policy, in Hugging Face form.
        samples: The batch; samples of a group may stand anywhere.
        objective: Settings of the loss.
        step: Settings of the optimizer.
        folders: The other models.
    """
    (update,) = policy_updates(folder, samples, objective, [range(len(samples))], step, folders)
    return update


def policy_updates(
    folder: str | Path,
    samples: Sequence[Sample],
    objective: Objective,
    mini_batches: Sequence[Sequence[int]],
    step: Step = DEFAULT_STEP,
    folders: Folders = Folders(),
) -> list[Update]:
    """One update after the other, each by the loss of one mini-batch and from the weights that SGD left before.

    Advantages and old logprobs are those of all samples before the first update.

    Args:
        folder: The policy, in Hugging Face form.
        samples: Samples of the step.
        objective: Settings of the loss.
        mini_batches: For each update the numbers of its samples.
        step: Settings of the optimizer.
        folders: The other models.
    """
    policy = load_float64(folder)
    samples = _with_old_logprobs(policy, samples, objective)
    with torch.no_grad():
        advantages = _advantages(_scored(policy, samples, objective, folders), objective, folders)
    updates = []
    for rows in mini_batches:
        scored = _scored(policy, [samples[i] for i in rows], objective, folders)
        losses = [_loss(s, advantages[i], objective) for s, i in zip(scored, rows, strict=True)]
        updates.append(one_update(policy, _mean(losses, objective), step))
        _go_on(policy, updates[-1])
    return updates


def critic_update(
    folder: str | Path,
    samples: Sequence[Sample],
    objective: Objective,
    step: Step = DEFAULT_STEP,
    folders: Folders = Folders(),
) -> Update:
    """The critic's part of the same step: `folder` is the policy, `folders.critic` the critic."""
    (update,) = critic_updates(folder, samples, objective, [range(len(samples))], step, folders)
    return update


def critic_updates(
    folder: str | Path,
    samples: Sequence[Sample],
    objective: Objective,
    mini_batches: Sequence[Sequence[int]],
    step: Step = DEFAULT_STEP,
    folders: Folders = Folders(),
) -> list[Update]:
    """The critic's part of `policy_updates`; returns and old values are those before the first update."""
    assert folders.critic is not None
    with torch.no_grad():
        scored = _scored(load_float64(folder), samples, objective, folders)
    estimated = _estimated(scored, replace(objective, lam=objective.critic_lam), folders)
    critic = load_classifier_float64(folders.critic)
    with torch.no_grad():
        before = [response_values(critic, s.prompt_ids, s.response_ids)[0] for s in samples]
    old = [_old_values(sample, values) for sample, values in zip(samples, before, strict=True)]
    updates = []
    for rows in mini_batches:
        losses = []
        for i in rows:
            values, _ = response_values(critic, samples[i].prompt_ids, samples[i].response_ids)
            counted, (_, returns) = scored[i].counted, estimated[i]
            pairs = [values[t] for t in counted], [old[i][t] for t in counted]
            losses.append(surrogates.value(*pairs, returns, objective.value_clip))
        of_critic = replace(objective, loss_aggregation=objective.critic_loss_aggregation)
        updates.append(one_update(critic, _mean(losses, of_critic), step))
        _go_on(critic, updates[-1])
    return updates


def _with_old_logprobs(policy: torch.nn.Module, samples: Sequence[Sample], objective: Objective) -> list[Sample]:
    """The samples; where the old policy is the one given, with what it says of them."""
    with torch.no_grad():
        now = [response_logprobs(policy, s.prompt_ids, s.response_ids, objective.temperature) for s in samples]
    return [
        replace(s, old_logprobs=logprobs.tolist()) if s.old_logprobs is None else s
        for s, logprobs in zip(samples, now, strict=True)
    ]


def _go_on(model: torch.nn.Module, update: Update) -> None:
    """Continue from the weights that SGD left."""
    model.zero_grad()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(update.after_sgd[name])


def _scored(policy: torch.nn.Module, samples: Sequence[Sample], objective: Objective, folders: Folders) -> list[Scored]:
    needs_reference = objective.kl_coef != 0 or objective.advantages in ("distillation", "minillm")
    reference = load_float64(folders.reference) if needs_reference and folders.reference else None
    judge = load_classifier_float64(folders.reward_model) if folders.reward_model else None
    scored = []
    for sample in samples:
        ids = sample.prompt_ids, sample.response_ids
        counted = [t for t, counts in enumerate(sample.mask) if counts]
        if objective.mask_truncated and not sample.finished:
            counted = []
        new, entropy = response_scores(policy, *ids, objective.temperature)
        old = new.detach().tolist() if sample.old_logprobs is None else list(sample.old_logprobs)
        if objective.anchor == "rollout":
            assert sample.rollout_logprobs is not None
            old = list(sample.rollout_logprobs)
        with torch.no_grad():
            ref = response_logprobs(reference, *ids, objective.temperature).tolist() if reference else None
            score = response_score(judge, *ids).item() if judge else 0.0
        reward = sample.reward + objective.reward_model_coef * score
        if objective.overlong_buffer is not None:
            assert objective.max_response_length is not None
            length = sum(sample.mask)
            reward += worth.overlong(length, objective.max_response_length, objective.overlong_buffer)
        penalties = [0.0] * len(old)
        if objective.kl_in_reward and objective.kl_coef:
            assert ref is not None
            each = [
                surrogates.divergence(torch.tensor(o, dtype=torch.float64), r, objective.kl_kind).item()
                for o, r in zip(old, ref, strict=True)
            ]
            penalties = [objective.kl_coef * penalty for penalty in each]
        scored.append(
            Scored(
                sample,
                counted,
                reward,
                [new[t] for t in counted],
                [entropy[t] for t in counted],
                [old[t] for t in counted],
                None if ref is None else [ref[t] for t in counted],
                worth.token_rewards(reward, [penalties[t] for t in counted]) if counted else [],
            )
        )
    return scored


def _advantages(scored: list[Scored], objective: Objective, folders: Folders) -> list[list[float]]:
    """Advantage of each token that counts."""
    kind = objective.advantages
    if kind == "distillation":  # Agarwal et al., arXiv 2306.13649: the reverse KL's log ratio at each sampled token
        return [[r - o for r, o in zip(s.ref or [], s.old, strict=True)] for s in scored]
    if kind == "minillm":  # Gu et al., arXiv 2306.08543, equation 2, without the -1, whose expectation is 0
        ratios = [[r - o for r, o in zip(s.ref or [], s.old, strict=True)] for s in scored]
        return [worth.discounted(row, 1.0) for row in ratios]
    if kind == "remax":  # arXiv 2310.10505, equation 4, and KL of this token and those after it
        left = [s.sample.greedy_reward or 0.0 for s in scored]
        return [[g - b for g in worth.discounted(s.rewards, 1.0)] for s, b in zip(scored, left, strict=True)]
    if kind == "reinforce++":
        return worth.whitened([worth.discounted(s.rewards, objective.gamma) for s in scored])
    if kind == "gae":
        return worth.whitened([advantages for advantages, _ in _estimated(scored, objective, folders)])
    if objective.by_turn:
        return _turn_advantages(scored, objective)
    whole = _whole_advantages(scored, [_of_whole(s) for s in scored], objective)
    repeated = [[a] * len(s.counted) for s, a in zip(scored, whole, strict=True)]
    return worth.whitened(repeated) if kind == "reinforce++ baseline" else repeated


def _turn_advantages(scored: list[Scored], objective: Objective) -> list[list[float]]:
    """For each token, its turn's rewards-to-go compared with those of this turn in the group."""
    given = [s.sample.turn_rewards or [] for s in scored]
    by_turn = [
        _whole_advantages(scored, column, objective)
        for column in worth.rewards_to_go([_of_whole(s) for s in scored], given)
    ]
    turns = [s.sample.turns if s.counted else [] for s in scored]
    return [[by_turn[k][i] for k in turns[i]] for i in range(len(scored))]


def _of_whole(s: Scored) -> float:
    """The reward of a response; without a token that counts it still speaks in its group."""
    return sum(s.rewards) if s.counted else s.reward


def _whole_advantages(scored: list[Scored], rewards: list[float], objective: Objective) -> list[float]:
    """Advantage of each response."""
    groups = [s.sample.group for s in scored]
    match objective.advantages:
        case "grpo":
            return worth.grpo(rewards, groups, objective.eps)
        case "dr_grpo" | "reinforce++ baseline":
            return worth.dr_grpo(rewards, groups)
        case "rloo":
            return worth.rloo(rewards, groups)
        case "opo":
            return worth.opo(rewards, groups, [sum(s.sample.mask) for s in scored])
        case "gpg":
            return worth.gpg(rewards, groups)
        case "maxrl":
            return [maxrl.advantages(worth.members(rewards, groups, g))[i] for g, i in _places(groups)]
        case "gdpo":
            parts = rewards, [float(r > 1) for r in rewards]
            each = [worth.grpo(part, groups, objective.eps) for part in parts]
            first, second = objective.part_weights
            sums = [first * x + second * y for x, y in zip(*each, strict=True)]
            spread = max(sums) > min(sums)
            return [a for (a,) in worth.whitened([[x] for x in sums])] if spread else [0.0] * len(sums)
        case "cpgd":
            return worth.cpgd_filtered(rewards, groups, objective.weight_cap)
    raise ValueError(objective.advantages)


def _estimated(scored: list[Scored], objective: Objective, folders: Folders) -> list[tuple[list[float], list[float]]]:
    """Advantages and returns of each response by generalised advantage estimation."""
    assert folders.critic is not None
    critic = load_classifier_float64(folders.critic)
    estimated = []
    for s in scored:
        with torch.no_grad():
            values, final = response_values(critic, s.sample.prompt_ids, s.sample.response_ids)
        old = _old_values(s.sample, values)
        after = final.item() if objective.bootstrap and not s.sample.finished else 0.0
        estimated.append(worth.gae(s.rewards, [old[t] for t in s.counted], objective.gamma, objective.lam, after))
    return estimated


def _old_values(sample: Sample, values: Tensor) -> list[float]:
    return values.detach().tolist() if sample.old_values is None else list(sample.old_values)


def _loss(s: Scored, advantages: list[float], objective: Objective) -> list[Tensor]:
    """Loss of each token that counts."""
    if not s.counted:
        return []
    losses = _surrogate(s, advantages, objective)
    if s.sample.rollout_logprobs is not None and objective.anchor == "old":
        rollout = [s.sample.rollout_logprobs[t] for t in s.counted]
        level, mode = objective.importance_level, objective.importance_mode
        ends = objective.importance_low, objective.importance_high
        weights = surrogates.importance(s.old, rollout, level, mode, *ends)
        losses = [loss * w for loss, w in zip(losses, weights, strict=True)]
    if objective.kl_coef and not objective.kl_in_reward:
        assert s.ref is not None
        tokens = zip(s.new, s.ref, s.old, strict=True)
        terms = [surrogates.divergence(n, r, objective.kl_kind, o) for n, r, o in tokens]
        losses = [loss + objective.kl_coef * term for loss, term in zip(losses, terms, strict=True)]
    return [loss - objective.entropy_coef * entropy for loss, entropy in zip(losses, s.entropy, strict=True)]


def _surrogate(s: Scored, advantages: list[float], objective: Objective) -> list[Tensor]:
    clips = objective.clip_low, objective.clip_high
    match objective.surrogate:
        case "ppo":
            return surrogates.ppo(s.new, s.old, advantages, *clips, objective.dual_clip)
        case "policy gradient":
            return surrogates.policy_gradient(s.new, advantages)
        case "importance sampled":
            return [-torch.exp(n - o) * a for n, o, a in zip(s.new, s.old, advantages, strict=True)]
        case "sapo":
            return [
                sapo.loss([n[None]], [_numbers([o])], [a], objective.tau_pos, objective.tau_neg)
                for n, o, a in zip(s.new, s.old, advantages, strict=True)
            ]
        case "dppo":
            return [
                dppo.loss([n[None]], [_numbers([o])], [a], objective.delta)
                for n, o, a in zip(s.new, s.old, advantages, strict=True)
            ]
        case "off-policy sequence masking":
            response = [torch.stack(s.new).detach()], [_numbers(s.old)]
            (counts,) = deepseek_v32.sequence_masks(*response, advantages[:1], objective.delta)
            return [counts * loss for loss in surrogates.ppo(s.new, s.old, advantages, *clips)]
        case "cispo":
            return surrogates.cispo(s.new, s.old, advantages, objective.clip_high)
        case "cpgd":
            return surrogates.cpgd(s.new, s.old, advantages, *clips, objective.drift_coef, objective.drift_clip)
        case "gspo" if objective.by_turn:
            return surrogates.gspo_token(s.new, s.old, advantages, *clips)
        case "gspo":
            return surrogates.gspo(s.new, s.old, advantages[0], *clips)
        case "gmpo":
            return surrogates.gmpo(s.new, s.old, advantages[0], *clips)
    raise ValueError(objective.surrogate)


def _places(groups: Sequence[int]) -> list[tuple[int, int]]:
    """The group of each sample, and its place among the group's."""
    return [(g, sum(other == g for other in groups[:i])) for i, g in enumerate(groups)]


def _numbers(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _mean(losses: list[list[Tensor]], objective: Objective) -> Tensor:
    stacked = [torch.stack(tokens) if tokens else torch.zeros(0, dtype=torch.float64) for tokens in losses]
    masks = [[True] * len(tokens) for tokens in stacked]
    return mean_loss(stacked, masks, objective.loss_aggregation, objective.max_response_length)
