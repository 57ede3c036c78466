"""Properties of right functions: for a function that no options explain, those that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.conform.terms import Given, Property

Changed = Callable[[dict[str, Any]], dict[str, Any]]


def broken(
    properties: Sequence[Property], given: Given, found: Callable[[Given], Tensor], right: Callable[[Given], Tensor]
) -> Iterator[Property]:
    """The properties that a function does not have and that a right one does.

    Args:
        properties: All properties of the function's kind.
        given: A case.
        found: The function.
        right: A right function.
    """
    for each in properties:
        if _holds(each, given, right) and not _holds(each, given, found):
            yield each


def _holds(what: Property, given: Given, function: Callable[[Given], Tensor]) -> bool:
    before, after = function(given), function(what.change(dict(given)))
    return after.shape == before.shape and torch.allclose(after, before, rtol=1e-4, atol=1e-5)


def of_weights(found: Tensor, right: Tensor, advantages: Tensor, has_kl: bool) -> tuple[str, str]:
    """The term that differs, found from the gradients of tokens: the right loss's differ by their advantages alone.

    Args:
        found: `[B, T]`, the gradient of an on-policy loss of rows of one length.
        right: `[B, T]`, the gradient of the algorithm's own loss.
        advantages: `[B, T]`, the same for all tokens of a row.
        has_kl: Whether the loss has a KL to a reference, which is the same policy here.
    """
    weights = found / right
    if torch.allclose(weights, torch.ones_like(weights), atol=1e-4):
        return "KL estimator" if has_kl else "ratio", "the gradient is right and the value is not"
    if not found.any():
        return "ratio", "the gradient is 0"
    if not torch.allclose(weights, weights[:, :1].expand_as(weights), atol=1e-4):
        zero = (weights.abs() < 1e-6).all(0)
        if zero.any():
            return "mask", f"the gradient of all rows is 0 at the tokens {zero.nonzero().flatten().tolist()}"
        return "ratio", f"tokens of one row weigh {_range(weights[0])} times what they should"
    rows, gains = weights[:, 0], advantages[:, 0] > 0
    if torch.allclose(rows.abs(), rows[0].abs().expand_as(rows), atol=1e-4):
        term = "denominator" if (rows > 0).all() else "sign"
        return term, f"the gradient is {_range(rows)} times what it should be, with rows of one length"
    if all(torch.allclose(side, side[:1], atol=1e-4) for side in (rows[gains], rows[~gains])):
        up, down = float(rows[gains][0]), float(rows[~gains][0])
        return "clip", f"rows with a positive advantage weigh {up:.3g} times what they should, others {down:.3g} times"
    return "normalization", f"rows weigh {_range(rows)} times what they should"


def of_groups(found: Tensor, right: Tensor, rewards: Tensor, group: Tensor) -> tuple[str, str]:
    """The term that differs, found from advantages of rows: the right ones are linear in the rewards of a group.

    Args:
        found: `[B]`, the advantages found.
        right: `[B]`, the algorithm's own.
        rewards: `[B]`.
        group: `[B]`, the number of each row's group.
    """
    for number in group.unique():
        own = group == number
        if torch.allclose(found[own], right[own], atol=1e-4):
            continue
        if not (found[own] + right[own]).isfinite().all():
            return "normalization", "advantages of a group are NaN or infinite"
        given = torch.stack([rewards[own], torch.ones_like(rewards[own])], 1)
        slope, start = torch.linalg.lstsq(given, found[own, None]).solution.flatten().tolist()
        of_right = float(torch.linalg.lstsq(given, right[own, None]).solution[0])
        if not torch.allclose(given @ torch.tensor([[slope], [start]]).to(given), found[own, None], atol=1e-4):
            if abs(float(found[own].sum())) > 1e-4 and (found[own].sign() == right[own].sign()).all():
                return "normalization", "advantages of a group have the right signs and different divisors"
            return "group", "advantages of a group are not linear in its rewards"
        if abs(slope - of_right) <= 1e-4 * abs(of_right):
            return "baseline", f"advantages of a group are off by {float((found - right)[own][0]):.4g}"
        zero, zero_of_right = -start / slope if slope else 0.0, float(rewards[own][0] - right[own][0] / of_right)
        if abs(zero - zero_of_right) < 1e-4:
            return "normalization", f"advantages of a group are {slope / of_right:.4g} times what they should be"
        return "baseline", f"the advantage of a reward of {zero:.4g} is 0, in place of {zero_of_right:.4g}"
    return "group", "advantages of rows in no group of their own differ"


def _range(x: Tensor) -> str:
    low, high = float(x.min()), float(x.max())
    return f"{low:.3g}" if high - low <= 1e-4 * abs(high) else f"{low:.3g} to {high:.3g}"


def _under_the_mask(*names: str) -> Changed:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        for name in names:
            if name in given:
                given[name] = torch.where(given["mask"] != 0, given[name], given[name] - 0.7)
        return given

    return change


def _rows(index: Callable[[int], Tensor]) -> Changed:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        chosen = index(len(given["mask"]))
        return {key: x[chosen] if isinstance(x, Tensor) and x.dim() else x for key, x in given.items()}

    return change


def _mask_of(*names: str) -> Property:
    return Property("mask", "what stands under the mask changes it", _under_the_mask(*names))


ORDER = Property("order", "the order of rows changes it", _rows(lambda rows: torch.arange(rows).flip(0)))
TWICE = Property("denominator", "each row twice gives another mean", _rows(lambda rows: torch.arange(rows).repeat(2)))
LOSS = (_mask_of("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"), ORDER, TWICE)
AGGREGATION = (_mask_of("loss"), ORDER, TWICE)
TOKENS = (_mask_of("token_rewards", "values"),)
WHITENING = (_mask_of("x"),)
LOGPROBS = (
    Property(
        "temperature",
        "twice the logits at twice the temperature give other logprobs",
        lambda given: {**given, "logits": 2 * given["logits"], "temperature": 2 * given["temperature"]},
    ),
)
