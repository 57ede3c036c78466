"""One update of supervised fine-tuning: the mean negative logprob of given responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.reference.update import DEFAULT_STEP, Step, Update, load_float64, mean_loss, one_update, response_logprobs


@dataclass(frozen=True)
class Example:
    """One prompt with the response to learn.

    Attributes:
        prompt_ids: Token ids, at least one.
        response_ids: Token ids, the end-of-sequence token included.
        loss_mask: True at tokens of the response that count; None for all.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[bool] | None = None


def sft_update(
    folder: str | Path,
    examples: Sequence[Example],
    loss_aggregation: str = "token-mean",
    max_response_length: int | None = None,
    temperature: float = 1.0,
    step: Step = DEFAULT_STEP,
) -> Update:
    """The loss of all examples as one batch, its gradient, and the weights after one step.

    Args:
        folder: The model, in Hugging Face form.
        examples: The batch.
        loss_aggregation: Mode of `mean_loss`.
        max_response_length: The divisor of the `constant` aggregation.
        temperature: Logits are divided by it.
        step: Settings of the optimizer.
    """
    model = load_float64(folder)
    losses = [-response_logprobs(model, e.prompt_ids, e.response_ids, temperature) for e in examples]
    masks = [[True] * len(e.response_ids) if e.loss_mask is None else [bool(m) for m in e.loss_mask] for e in examples]
    return one_update(model, mean_loss(losses, masks, loss_aggregation, max_response_length), step)
