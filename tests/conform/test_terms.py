"""The references: rlflow's own functions conform, and every way to compute a term is distinguished from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.conform.advantages import GROUP, TOKENS, group_advantages, token_advantages
from rlflow.conform.diagnosis import Diagnosis, Kind, conform
from rlflow.conform.losses import LOSS_TERMS, batch_loss
from rlflow.conform.terms import Terms, changes_from
from rlflow.functional import (
    aggregate,
    cispo_loss,
    gae,
    gmpo_loss,
    group_normalized_advantages,
    gspo_loss,
    kl_estimate,
    opo_advantages,
    ppo_clip_loss,
    reinforce_returns,
    rloo_advantages,
    sapo_loss,
)
from tests.slow import slow_but

Arguments = dict[str, Any]


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    return aggregate(ppo_clip_loss(logprobs, old_logprobs, advantages, clip_low, clip_high), mask, "token-mean")


def with_kl(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    loss = ppo_clip_loss(logprobs, old_logprobs, advantages, 0.2, 0.2)
    return aggregate(loss + kl_coef * kl_estimate(logprobs, ref_logprobs, "k3"), mask, "token-mean")


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    loss = gspo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return aggregate(loss, mask, "sequence-mean-token-mean")


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    loss = gmpo_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return aggregate(loss, mask, "sequence-mean-token-mean")


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_high: float) -> Tensor:
    return cispo_loss(logprobs, old_logprobs, advantages, clip_high)


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return sapo_loss(logprobs, old_logprobs, advantages)


def dr_grpo(rewards: Tensor, group: Tensor) -> Tensor:
    return group_normalized_advantages(rewards, group, normalize_std=False)


def opo(rewards: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    return opo_advantages(rewards, lengths, group)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    return gae(token_rewards, values, mask, gamma, lam)


def returns(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    return reinforce_returns(token_rewards, mask, gamma)


OURS: list[tuple[Kind, Callable[..., Any], str]] = [
    ("loss", ppo, "grpo"),
    ("loss", with_kl, "grpo"),
    ("loss", gspo, "gspo"),
    ("loss", gmpo, "gmpo"),
    ("loss", cispo, "cispo"),
    ("loss", sapo, "sapo"),
    ("advantages", group_normalized_advantages, "grpo"),
    ("advantages", dr_grpo, "dr_grpo"),
    ("advantages", rloo_advantages, "rloo"),
    ("advantages", opo, "opo"),
    ("advantages", gae_advantages, "ppo"),
    ("advantages", returns, "reinforce_plus_plus"),
]


@pytest.mark.parametrize(("kind", "function", "algorithm"), OURS, ids=lambda each: getattr(each, "__name__", None))
def test_a_function_of_ours_conforms(kind: Kind, function: Callable[..., Any], algorithm: str) -> None:
    found = conform(kind, function, algorithm)
    differing = [each.text for each in found.changes if each.option != "none"]  # returns are not whitened yet
    assert (found.verdict != "differs", differing, found.unexplained) == (True, [], ())


def test_ppo_s_loss_is_not_cispo_s() -> None:
    assert conform("loss", ppo, "cispo").terms == {"clip"}


# What a function takes, by its interface, so that every term is examined.
LOSS_TAKES = "logprobs old_logprobs ref_logprobs rollout_logprobs advantages mask kl_coef clip_low clip_high max_length"
TAKES: dict[str, str] = {
    "loss": LOSS_TAKES,
    "group": "rewards group rollout mask lengths group_size token_rewards",
}


def made(names: str, value: Callable[[Arguments], Tensor]) -> Callable[..., Tensor]:
    """A function of these parameters."""
    scope: dict[str, Any] = {"value": value}
    listed = ", ".join(names.split())
    exec(f"def function({listed}):\n    return value(dict({', '.join(f'{n}={n}' for n in names.split())}))", scope)
    found: Callable[..., Tensor] = scope["function"]
    return found


def first(terms: Terms) -> dict[str, str]:
    return {term: next(iter(options)) for term, options in terms.items()}


UNSEEN = ("denominator of micro-batches", "denominator of ranks", "clip range")  # by a function of one batch
SAME = (  # whose range is of logs; as another option; as the surrogate's
    *(("clip", "gmpo"), ("denominator", "sequence-mean")),
    ("denominator of KL", "token-mean"),
)
LOSS_CASES = [
    (change.term, change.option)
    for change in changes_from(first(LOSS_TERMS), LOSS_TERMS)
    if change.term not in UNSEEN and (change.term, change.option) not in SAME
]
FOR_TOKENS = {**first(GROUP.terms), "baseline of rejected rows": "counted"}  # of functions that take token_rewards
GROUP_CASES = [(change.term, change.option) for change in changes_from(FOR_TOKENS, GROUP.terms)]
TOKEN_CASES = [(change.term, change.option) for change in changes_from(first(TOKENS.terms), TOKENS.terms)]


def names(found: Diagnosis, term: str, option: str) -> bool:
    """Whether the option is among what was found."""
    every = [found.changes, *found.others]
    return any((change.term, change.option) == (term, option) for changes in every for change in changes)


@pytest.mark.parametrize(
    ("term", "option"),
    slow_but([("clip", "max"), ("mask", "late"), ("sign of KL", "minus"), ("denominator", "width")], LOSS_CASES),
)
def test_an_option_of_a_loss_is_named(term: str, option: str) -> None:
    choice = {**first(LOSS_TERMS), term: option}
    assert names(conform("loss", made(TAKES["loss"], lambda given: batch_loss(given, choice))), term, option)


@pytest.mark.parametrize(
    ("term", "option"),
    slow_but([("group", "batch"), ("baseline", "others"), ("normalization", "variance")], GROUP_CASES),
)
def test_an_option_of_advantages_of_groups_is_named(term: str, option: str) -> None:
    choice = {**FOR_TOKENS, term: option}
    function = made(TAKES["group"], lambda given: group_advantages(given, choice))
    assert names(conform("advantages", function), term, option)


@pytest.mark.parametrize(("term", "option"), slow_but([("mask", "reset"), ("position", "end")], TOKEN_CASES))
def test_an_option_of_advantages_of_tokens_is_named(term: str, option: str) -> None:
    choice = {**first(TOKENS.terms), term: option}
    takes = f"{'rewards' if term == 'position' else 'token_rewards'} values mask gamma lam"

    def value(given: Arguments) -> Tensor:
        return token_advantages({"token_rewards": torch.zeros_like(given["values"]), **given}, choice)

    found = conform("advantages", made(takes, value), "ppo")
    assert names(found, term, option)
