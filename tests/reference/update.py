"""Scores of single responses, the mean over a batch of them, and one optimizer step from the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlflow.models.picture_processor import class_of, reads_pictures

PICTURES = "pictures.pt"  # in a model's folder: what transformers' model reads of the pictures of each prompt


@dataclass(frozen=True)
class Update:
    """One update of all weights, by their names in the Hugging Face model (tied weights once), on the CPU in float64.

    Attributes:
        loss: Loss of the whole batch.
        gradient: Gradient of the loss, before clipping.
        gradient_norm: L2 norm over all parameters, before clipping.
        after_sgd: The weights after one step of plain SGD.
        after_adamw: The weights after the first step of AdamW. Its size hardly depends on the gradient's: where a
            gradient is near 0, rounding decides about its direction, so compare in units of the learning rate.
    """

    loss: float
    gradient: dict[str, Tensor]
    gradient_norm: float
    after_sgd: dict[str, Tensor]
    after_adamw: dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """Settings of the optimizer step.

    Attributes:
        lr: Learning rate.
        gradient_clipping: Largest norm of the gradient; 0 is off.
        weight_decay: Weight decay of AdamW, decoupled.
        eps: Epsilon of AdamW.
    """

    lr: float = 1e-2
    gradient_clipping: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-8


DEFAULT_STEP = Step()


def load_float64(folder: str | Path) -> PreTrainedModel:
    """The causal language model in `folder`, in float64, without dropout."""
    if reads_pictures(config := AutoConfig.from_pretrained(folder)):
        model = class_of(config, scalar=False).from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
        return _shown_pictures(model.eval(), Path(folder))
    # Experts are computed one by one: products of all together know no float64.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    return model.eval()


def load_classifier_float64(folder: str | Path) -> PreTrainedModel:
    """The sequence classification model with one label in `folder`, in float64, without dropout."""
    config = AutoConfig.from_pretrained(folder)
    shows = reads_pictures(config)
    kind = class_of(config, scalar=True) if shows else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa", num_labels=1).eval()
    return _shown_pictures(model, Path(folder)) if shows else model


def _shown_pictures(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model, which is shown the pictures of the prompt with which a row of tokens begins."""
    inputs: dict[tuple[int, ...], dict[str, Tensor]] = torch.load(folder / PICTURES)

    def with_pictures(_: object, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[object, ...]:
        ids = given[0] if given else named["input_ids"]
        row = tuple(ids[0].tolist())
        prompt = max((prompt for prompt in inputs if row[: len(prompt)] == prompt), key=len)
        seen = {name: of.double() if of.is_floating_point() else of for name, of in inputs[prompt].items()}
        if "image_grid_thw" in seen:
            seen["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        return given, named | seen

    model.base_model.register_forward_pre_hook(with_pictures, with_kwargs=True)
    return model


def response_scores(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Logprob of each token of one response, and entropy of the distribution it was drawn from, `[T]` each.

    Of `softmax(logits / temperature)` at the position before the token.
    """
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]  # [T, V]
    logprobs = (logits / temperature).log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs[range(len(response_ids)), list(response_ids)], entropy


def response_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float
) -> Tensor:
    """The first of `response_scores`."""
    return response_scores(model, prompt_ids, response_ids, temperature)[0]


def response_values(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Value before each token of one response `[T]`, and after the last one, 0-dim: the head on the hidden states."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]  # [P + T, H]
    values = model.score(hidden)[len(prompt_ids) - 1 :, 0]
    return values[:-1], values[-1]


def response_score(model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Tensor:
    """Score of one response, 0-dim: what transformers says of the whole sequence, which it reads at its last token."""
    return model(input_ids=torch.tensor([[*prompt_ids, *response_ids]]), use_cache=False).logits[0, 0]


def mean_loss(losses: Sequence[Tensor], masks: Sequence[Sequence[bool]], mode: str, max_length: int | None) -> Tensor:
    """The loss of a batch from the losses `[T]` of its responses; those without a token that counts are left out.

    Of `constant` they are not: Dr. GRPO, arXiv 2503.20783, figure 1, divides by the number of responses sampled.

    Args:
        losses: One tensor for each response.
        masks: True at tokens of each response that count.
        mode: `token-mean`, `sequence-mean-token-mean`, `sequence-mean-token-sum` or `constant`.
        max_length: The divisor of `constant`.
    """
    kept = [loss[torch.tensor(mask)] for loss, mask in zip(losses, masks, strict=True) if any(mask)]
    if mode == "token-mean":
        return torch.cat(kept).mean()
    if mode == "sequence-mean-token-mean":
        return torch.stack([tokens.mean() for tokens in kept]).mean()
    if mode == "sequence-mean-token-sum":
        return torch.stack([tokens.sum() for tokens in kept]).mean()
    if mode == "constant":
        assert max_length is not None
        return torch.stack([tokens.sum() / max_length for tokens in kept]).sum() / len(losses)
    raise ValueError(mode)


def one_update(model: PreTrainedModel, loss: Tensor, step: Step) -> Update:
    """Differentiate `loss` and take one step of SGD and, from the same weights, one of AdamW."""
    loss.backward()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradient = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt().item()
    scale = min(1.0, step.gradient_clipping / (norm + 1e-6)) if step.gradient_clipping else 1.0
    clipped = {name: g * scale for name, g in gradient.items()}
    return Update(
        loss=loss.item(),
        gradient=gradient,
        gradient_norm=norm,
        after_sgd={name: w - step.lr * clipped[name] for name, w in weights.items()},
        after_adamw={name: _first_adamw_step(w, clipped[name], step) for name, w in weights.items()},
    )


def _first_adamw_step(weight: Tensor, gradient: Tensor, step: Step) -> Tensor:
    # After one step the bias-corrected moments are the gradient and its square, whatever the betas: arXiv 1711.05101.
    return weight * (1 - step.lr * step.weight_decay) - step.lr * gradient / (gradient.square().sqrt() + step.eps)
