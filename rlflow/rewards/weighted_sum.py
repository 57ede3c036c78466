"""Several rewards as one, and the forms in which a reward may be given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from rlflow.dotted_path import object_at
from rlflow.errors import UserError, did_you_mean
from rlflow.rewards.function import CallableReward, name_of
from rlflow.rewards.reward import EarlyReward, Failed, OnError, Reward, RewardInput, Scores, scored
from rlflow.short_names import made, names_of, path_of

OneReward = Reward | str | Callable[..., Any]
RewardLike = Reward | str | list[OneReward] | dict[str, OneReward] | Callable[..., Any]


def as_reward(value: RewardLike) -> Reward:
    """The `Reward` that a setting or an argument names.

    Args:
        value: A `Reward`; the short name of a reward of rlflow, such as `math_verify`; a function, see
            `CallableReward`; the dotted path of a function or of a class of rewards; a list of these, for their sum; or
            a dict of names to these, for a sum whose parts have these names.

    Raises:
        UserError: The value has none of these forms, or is empty; or nothing is at the path.
    """
    if isinstance(value, Reward):
        return value
    if isinstance(value, str):
        path = path_of(value, [Reward])
        if "." not in path:
            hint = did_you_mean(value, names_of([Reward])) or " Write module.function"
            raise UserError(f"`reward` is {value!r}, and no reward is known by that name.{hint}")
        found = object_at(path, f"`reward` is {value!r}")
        is_class = isinstance(found, type) and issubclass(found, Reward)
        return cast(Reward, made(value, "reward", Reward)) if is_class else CallableReward(value)
    if isinstance(value, list):
        return WeightedSum(_by_name([as_reward(each) for each in value]))
    if isinstance(value, Mapping):
        return WeightedSum(dict(value))
    if isinstance(value, type) and issubclass(value, Reward):
        raise UserError(f"`reward` is the class {value.__name__}; give an instance, {value.__name__}(...)")
    if not callable(value):
        raise UserError(
            f"`reward` is {value!r:.60}; give a function, its dotted path, a Reward, or a list or dict of these"
        )
    return CallableReward(value)


class WeightedSum(Reward):
    """The weighted sum of several rewards; each part is logged unweighted under its name.

        WeightedSum({"right": ExactMatch(), "brevity": my_rewards.brevity}, {"right": 1.0, "brevity": 0.1})

    If a reward has parts itself, such as a function that returns a dict, their sum is one part here. A part that does
    not apply to a sample adds nothing to the sum. If a part with `on_error` `drop` fails on a sample, the whole sample
    is dropped. If a part with `zero` fails, this part counts 0. A sample on which several parts fail is counted once
    as an error. If no part applies to a sample, the sum fails on it: the run ends if any part has `raise`; else the
    sample is dropped if any part has `drop`; else it gets 0.

    Args:
        parts: The rewards by name, in any form that `as_reward` takes.
        weights: The weights, by the same names; None for 1 each.
    """

    def __init__(self, parts: Mapping[str, OneReward], weights: dict[str, float] | None = None) -> None:
        if not parts:
            raise UserError("`reward` is a sum of no rewards; give at least one")
        self.weights = dict.fromkeys(parts, 1.0) if weights is None else weights
        if parts.keys() != self.weights.keys():
            raise UserError(
                f"`parts` are [{', '.join(parts)}] but `weights` are for [{', '.join(self.weights)}];"
                " give each part a weight"
            )
        self.parts = {name: as_reward(part) for name, part in parts.items()}
        super().__init__(strictest(self.parts.values()))
        reads: dict[str, bool] = {}
        for part in self.parts.values():
            reads |= {name: may_be_null and reads.get(name, True) for name, may_be_null in part.reads.items()}
        self.reads = reads

    @property
    def drops(self) -> bool:
        return any(part.drops for part in self.parts.values())

    @property
    def checked_by(self) -> str | None:
        return checked_by_parts(self.parts)

    def scored_early(self) -> list[EarlyReward]:
        return [each for part in self.parts.values() for each in part.scored_early()]

    def check(self, row: dict[str, Any]) -> None:
        for part in self.parts.values():
            part.check(row)

    def score(self, responses: RewardInput) -> Scores:
        scores = {name: scored(part, responses) for name, part in self.parts.items()}
        failed: dict[int, Failed] = {}
        metrics: dict[str, Any] = {}  # by the part's own names; of two alike the later one has its part's in front
        columns: dict[str, Any] = {}
        for part_name, part in scores.items():
            failed |= {i: how for i, how in part.failed.items() if failed.get(i) != "drop"}
            for of_all, own in ((metrics, part.metrics), (columns, part.columns)):
                of_all.update({f"{part_name}/{name}" if name in of_all else name: own[name] for name in own})
        weighted = [[self.weights[name] * score for score in part.total] for name, part in scores.items()]
        total = [sum(sample) for sample in zip(*weighted, strict=True)]
        absent = frozenset[int].intersection(*(part.absent for part in scores.values()))
        parts = {
            name: [None if i in part.absent else score for i, score in enumerate(part.total)]
            for name, part in scores.items()
        }
        return Scores(total, parts, failed, absent, metrics, columns)

    def __str__(self) -> str:
        return f"sum of {', '.join(self.parts)}"


def checked_by_parts(rewards: Mapping[str, Reward]) -> str | None:
    """`checked_by` of several rewards together, with the columns that each of them reads."""
    names = {name: each.checked_by for name, each in rewards.items()}
    if None in names.values():
        return None
    return " | ".join(f"{name}: {names[name]} {dict(each.reads)}" for name, each in rewards.items())


def strictest(rewards: Iterable[Reward]) -> OnError:
    """The policy for failures of several rewards together: `raise` if one has it, else `drop` if one has it."""
    policies = {each.on_error for each in rewards}
    order: tuple[OnError, ...] = ("raise", "drop", "zero")
    return next(how for how in order if how in policies)


def _by_name(rewards: list[Reward]) -> dict[str, Reward]:
    """The rewards under the names of their functions or classes, numbered where these are alike."""
    found: dict[str, Reward] = {}
    for reward in rewards:
        name = type(reward).__name__
        if isinstance(reward, CallableReward):
            function = reward.function
            name = function.rpartition(".")[2] if isinstance(function, str) else name_of(function)
        names = (name, *(f"{name}_{number}" for number in range(2, len(rewards) + 1)))
        found[next(each for each in names if each not in found)] = reward
    return found
