"""One update of score centering, arXiv 2609.20807, over the tokens that each token was sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.reference.update import Step, Update, load_float64, one_update


@dataclass(frozen=True)
class Centered:
    """One response.

    Attributes:
        prompt_ids: Token ids.
        response_ids: Token ids.
        advantage: Advantage of all its tokens.
        choices: For each token, the tokens that it could have been, itself first, and the engine's log-probabilities.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    advantage: float
    choices: Sequence[tuple[Sequence[int], Sequence[float]]]


def score_centering_update(
    folder: str | Path, responses: Sequence[Centered], high: float, temperature: float, step: Step
) -> Update:
    """`-A (w_y log p_y - sum_v q_v w_v log p_v)` with `w = min(p / q, high)` held fixed; the mean over all tokens.

    Args:
        folder: The model, in Hugging Face form.
        responses: The batch.
        high: The largest weight.
        temperature: Logits are divided by it.
        step: Settings of the optimizer.
    """
    model = load_float64(folder)
    losses = []
    for each in responses:
        ids = torch.tensor([[*each.prompt_ids, *each.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
        for place, (tokens, sampler) in enumerate(each.choices, len(each.prompt_ids) - 1):
            logp = torch.stack([logits[place, token] for token in tokens]).log_softmax(0)
            centered = torch.zeros((), dtype=torch.float64)
            for number, (of_policy, of_engine) in enumerate(zip(logp, sampler, strict=True)):
                q = torch.tensor(of_engine, dtype=torch.float64).exp()
                weight = min(float(of_policy.exp() / q), high)
                centered = centered + (float(number == 0) - float(q)) * weight * of_policy
            losses.append(-each.advantage * centered)
    return one_update(model, torch.stack(losses).mean(), step)
