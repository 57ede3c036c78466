"""Losses on pairs of responses, a preferred one and a rejected one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    beta: float,
) -> Tensor:
    """`-log sigmoid(beta ((log pi(c) - log ref(c)) - (log pi(r) - log ref(r))))` of the chosen `c` and rejected `r`.

    DPO, arXiv 2305.18290, equation 7. The reference's logprobs are detached.

    Args:
        chosen_logprobs: `[B]`, summed over the tokens of each chosen response.
        rejected_logprobs: `[B]`, the same for the rejected response of each pair.
        ref_chosen_logprobs: `[B]`, the same under the reference, for the chosen response.
        ref_rejected_logprobs: `[B]`, the same under the reference, for the rejected response.
        beta: Weight of the divergence from the reference.

    Returns:
        `[B]`, one loss per pair.
    """
    margin = (chosen_logprobs - ref_chosen_logprobs.detach()) - (rejected_logprobs - ref_rejected_logprobs.detach())
    return -logsigmoid(beta * margin)


def simpo_loss(chosen_logprobs: Tensor, rejected_logprobs: Tensor, beta: float, gamma: float) -> Tensor:
    """`-log sigmoid(beta (log pi(c)/|c| - log pi(r)/|r|) - gamma)` of the chosen `c` and the rejected `r`.

    SimPO, arXiv 2405.14734, equation 6.

    Args:
        chosen_logprobs: `[B]`, the mean over the tokens of each chosen response.
        rejected_logprobs: `[B]`, the same for the rejected response of each pair.
        beta: Scale of the log-probabilities.
        gamma: Margin by which the chosen response should be ahead.

    Returns:
        `[B]`, one loss per pair.
    """
    return -logsigmoid(beta * (chosen_logprobs - rejected_logprobs) - gamma)


def kto_loss(
    log_ratios: Tensor,
    divergence: Tensor,
    good: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`w_g (1 - sigmoid(beta (r - z)))` for a good response, `w_b (1 - sigmoid(beta (z - r)))` for a bad response.

    KTO, arXiv 2402.01306, equations 7 and 8. The divergence is detached.

    Args:
        log_ratios: r `[B]`: log-probability of each response under the policy, minus that under the reference.
        divergence: z, 0-dim: divergence of the policy from the reference, at least 0.
        good: `[B]` bool, True for good responses.
        beta: Factor on log ratios; gains and losses saturate sooner if it is larger.
        desirable_weight: Weight of good responses.
        undesirable_weight: Weight of bad responses.

    Returns:
        `[B]`, one loss per response.
    """
    ahead = log_ratios - divergence.detach().to(log_ratios.dtype)
    lost = 1.0 - (beta * ahead.where(good, -ahead)).sigmoid()
    return lost * torch.where(good, desirable_weight, undesirable_weight)


def bradley_terry_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """`-log sigmoid(s(c) - s(r))` of the chosen `c` and the rejected `r`; nothing is detached.

    The reward model's loss of InstructGPT, arXiv 2203.02155, equation 1.

    Args:
        chosen_scores: `[B]`.
        rejected_scores: `[B]`, for the same pairs.

    Returns:
        `[B]`, one loss per pair.
    """
    return -logsigmoid(chosen_scores - rejected_scores)


def preference_accuracy(margin: Tensor) -> Tensor:
    """1 if the chosen response is ahead, 0 if the rejected response is ahead, 1/2 if neither is.

    Args:
        margin: `[B]`, how far the chosen response of each pair is ahead.

    Returns:
        `[B]`.
    """
    return margin.sign() / 2 + 0.5
