"""One update of a discriminator between given responses and samples, and the rewards of samples after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.reference.update import DEFAULT_STEP, Step, Update, load_classifier_float64, one_update, response_score

Row = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of a response


def discriminator_update(
    folder: str | Path, given: Sequence[Row], sampled: Sequence[Row], step: Step = DEFAULT_STEP
) -> tuple[Update, list[float]]:
    """Descends from `E_sampled[log D] + E_given[log(1 - D)]` turned round: arXiv 1606.03476, equation 17.

    The paper's D is the probability of being sampled, and rises; `1 - D = 1 / (1 + exp(-s))` of the score s.
    Expectations are means; their sum is taken times the samples and divided by all rows, as one denominator does.

    Args:
        folder: The discriminator, in Hugging Face form.
        given: Responses of the dataset.
        sampled: Responses that the policy sampled.
        step: Settings of the optimizer.

    Returns:
        The update, and `-log D` of each sample after it: what the policy, which descends `E_sampled[log D]`, is paid.
    """
    model = load_classifier_float64(folder)
    of_given = torch.stack([torch.log(1 + torch.exp(-response_score(model, *row))) for row in given])
    of_sampled = torch.stack([torch.log(1 + torch.exp(response_score(model, *row))) for row in sampled])
    loss = (of_given.mean() + of_sampled.mean()) * len(sampled) / (len(sampled) + len(given))
    update = one_update(model, loss, step)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(update.after_sgd[name])
        scores = [response_score(model, *row).item() for row in sampled]
    return update, [math.log(1 + math.exp(score)) for score in scores]
