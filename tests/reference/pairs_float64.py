"""One update by pairs of a preferred and another response: DPO, and a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.reference.update import (
    DEFAULT_STEP,
    Step,
    Update,
    load_classifier_float64,
    load_float64,
    one_update,
    response_logprobs,
    response_score,
)


@dataclass(frozen=True)
class Pair:
    """One prompt with two responses, end-of-sequence tokens included."""

    prompt_ids: Sequence[int]
    chosen_ids: Sequence[int]
    rejected_ids: Sequence[int]


def dpo_update(
    folder: str | Path, reference: str | Path, pairs: Sequence[Pair], beta: float, step: Step = DEFAULT_STEP
) -> Update:
    """`-log sigmoid(beta log(pi(c) ref(r) / (pi(r) ref(c))))`, its mean over the pairs: arXiv 2305.18290, equation 7.

    Args:
        folder: The policy, in Hugging Face form.
        reference: The reference policy.
        pairs: The batch.
        beta: Weight of the divergence from the reference.
        step: Settings of the optimizer.
    """
    policy, ref = load_float64(folder), load_float64(reference)
    losses = []
    for pair in pairs:
        margin = torch.zeros((), dtype=torch.float64)
        for sign, response in ((1, pair.chosen_ids), (-1, pair.rejected_ids)):
            with torch.no_grad():
                given = response_logprobs(ref, pair.prompt_ids, response, 1.0).sum()
            margin = margin + sign * (response_logprobs(policy, pair.prompt_ids, response, 1.0).sum() - given)
        losses.append(torch.log(1 + torch.exp(-beta * margin)))
    return one_update(policy, torch.stack(losses).mean(), step)


def kto_update(
    folder: str | Path,
    reference: str | Path,
    rows: Sequence[tuple[Sequence[int], Sequence[int], bool]],
    beta: float,
    weights: tuple[float, ...],
    step: Step = DEFAULT_STEP,
) -> Update:
    """KTO, arXiv 2402.01306, equations 7 and 8, with z of mismatched rows, shifted by one (section 4.1 there).

    Args:
        folder: The policy, in Hugging Face form.
        reference: The reference policy.
        rows: Prompt and tokens of each response, and whether it is good.
        beta: Beta of the value function.
        weights: Weights of good responses and of bad ones.
        step: Settings of the optimizer.
    """
    policy, ref = load_float64(folder), load_float64(reference)

    def reward(prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            given = response_logprobs(ref, prompt, response, 1.0).sum()
        return response_logprobs(policy, prompt, response, 1.0).sum() - given

    with torch.no_grad():
        shifted = [reward(prompt, rows[(i + 1) % len(rows)][1]) for i, (prompt, _, _) in enumerate(rows)]
    z = max(0.0, float(sum(shifted)) / len(rows))
    losses = []
    for prompt, response, good in rows:
        r = reward(prompt, response)
        value = 1 / (1 + torch.exp(-beta * (r - z))) if good else 1 / (1 + torch.exp(-beta * (z - r)))
        losses.append(weights[0 if good else 1] * (1 - value))
    return one_update(policy, torch.stack(losses).mean(), step)


def simpo_update(
    folder: str | Path, pairs: Sequence[Pair], beta: float, gamma: float, step: Step = DEFAULT_STEP
) -> Update:
    """`-log sigmoid(beta mean log pi(c) - beta mean log pi(r) - gamma)`, its mean over the pairs: arXiv 2405.14734, 6.

    Args:
        folder: The policy, in Hugging Face form.
        pairs: The batch.
        beta: Scale of the log-probabilities, which are means over tokens.
        gamma: Target margin.
        step: Settings of the optimizer.
    """
    policy, losses = load_float64(folder), []
    for pair in pairs:
        per_token = [
            response_logprobs(policy, pair.prompt_ids, ids, 1.0).sum() / len(ids)
            for ids in (pair.chosen_ids, pair.rejected_ids)
        ]
        losses.append(torch.log(1 + torch.exp(gamma - beta * (per_token[0] - per_token[1]))))
    return one_update(policy, torch.stack(losses).mean(), step)


def reward_model_update(folder: str | Path, pairs: Sequence[Pair], step: Step = DEFAULT_STEP) -> Update:
    """`-log(exp s(c) / (exp s(c) + exp s(r)))`, its mean over the pairs: InstructGPT, arXiv 2203.02155, equation 1.

    Args:
        folder: The reward model, in Hugging Face form.
        pairs: The batch.
        step: Settings of the optimizer.
    """
    model = load_classifier_float64(folder)
    losses = []
    for pair in pairs:
        scores = [response_score(model, pair.prompt_ids, ids) for ids in (pair.chosen_ids, pair.rejected_ids)]
        losses.append(-torch.log_softmax(torch.stack(scores), dim=0)[0])
    return one_update(model, torch.stack(losses).mean(), step)
