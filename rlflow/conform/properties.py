"""What holds of every right function of a kind, for a function whose numbers no known formula gives."""

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
        properties: All of its kind.
        given: A case.
        found: The function.
        right: A right function.
    """
    for each in properties:
        if _holds(each, given, right) and not _holds(each, given, found):
            yield each


def _holds(what: Property, given: Given, function: Callable[[Given], Tensor]) -> bool:
    first = what.of({key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()})
    before, after = function(first), function(what.change(dict(first)))
    expected = what.then(before)
    return after.shape == expected.shape and torch.allclose(after, expected, rtol=1e-4, atol=1e-5)


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


def _of(name: str, new: Callable[[Tensor], Tensor]) -> Changed:
    return lambda given: {**given, name: new(given[name])}


def _other_prompt(given: dict[str, Any]) -> dict[str, Any]:
    """More reward for the rows of another prompt than that of the first row."""
    more = (given["group"] != given["group"][0]).to(given["rewards"].dtype)
    given["rewards"] = given["rewards"] + more * given["rewards"].square()
    given["token_rewards"] = given["token_rewards"] * (1 + more * given["rewards"])[:, None]
    return given


def _rewards(new: Callable[[Tensor], Tensor]) -> Changed:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        given["token_rewards"] = torch.where(given["token_rewards"] != 0, new(given["token_rewards"]), 0.0)
        return {**given, "rewards": new(given["rewards"])}

    return change


def on_policy(given: dict[str, Any]) -> dict[str, Any]:
    """The same, of a policy that is the old one and the reference."""
    return {**given, **dict.fromkeys(("old_logprobs", "ref_logprobs", "rollout_logprobs"), given["logprobs"])}


LOSS = (
    Property(
        "mask",
        "what stands under the mask changes it",
        _under_the_mask("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"),
    ),
    Property("order", "the order of rows changes it", _rows(lambda rows: torch.arange(rows).flip(0))),
    Property("denominator", "each row twice gives another mean", _rows(lambda rows: torch.arange(rows).repeat(2))),
    Property(
        "sign",
        "opposite advantages at a ratio of 1 do not give the opposite",
        _of("advantages", lambda a: -a),
        lambda x: -x,
        on_policy,
    ),
    Property(
        "normalization",
        "twice the advantages at a ratio of 1 do not give twice the loss",
        _of("advantages", lambda a: 2 * a),
        lambda x: 2 * x,
        on_policy,
    ),
)
AGGREGATION = (
    Property("mask", "what stands under the mask changes it", _under_the_mask("loss")),
    Property("order", "the order of rows changes it", _rows(lambda rows: torch.arange(rows).flip(0))),
    Property("denominator", "each row twice gives another mean", _rows(lambda rows: torch.arange(rows).repeat(2))),
    Property(
        "normalization", "twice the losses do not give twice the mean", _of("loss", lambda x: 2 * x), lambda x: 2 * x
    ),
)
GROUP = (
    Property("group", "the rewards of another prompt change it", _other_prompt),
    Property("baseline", "the same number added to all rewards changes it", _rewards(lambda r: r + 0.5)),
    Property("normalization", "twice the rewards give other advantages than once", _rewards(lambda r: 2 * r)),
    Property(
        "normalization",
        "twice the rewards do not give twice the advantages",
        _rewards(lambda r: 2 * r),
        lambda x: 2 * x,
    ),
)
TOKENS = (Property("mask", "rewards or values under the mask change it", _under_the_mask("token_rewards", "values")),)
WHITENING = (
    Property("mask", "what stands under the mask changes it", _under_the_mask("x")),
    Property("baseline", "the same number added to all entries changes it", _of("x", lambda x: x + 3.0)),
    Property("normalization", "twice the entries give other numbers than once", _of("x", lambda x: 2 * x)),
)
LOGPROBS = (
    Property(
        "temperature",
        "twice the logits at twice the temperature give other logprobs",
        lambda given: {**given, "logits": 2 * given["logits"], "temperature": 2 * given["temperature"]},
    ),
    Property("normalization", "the same number added to all logits changes it", _of("logits", lambda z: z + 3.0)),
)
