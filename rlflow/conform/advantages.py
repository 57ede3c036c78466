"""What is right for advantages, and for whitening: baselines of groups, returns along tokens, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.conform import properties
from rlflow.conform.terms import Case, Choice, Given, Interface, Option, View

# Which rows are compared: numbers, equal for rows of one group.
GROUPS = {
    "prompt": Option("rows of the same prompt", lambda given: given["group"]),
    "batch": Option("one baseline is shared by all prompts", lambda given: torch.zeros_like(given["group"])),
    "chunks": Option(
        "rows are cut into groups of one size in order, whatever their prompt",
        lambda given: torch.arange(len(given["group"])) // given["group_size"],
    ),
    "neighbours": Option(
        "only rows of a prompt that stand next to each other are compared",
        lambda given: torch.cat([torch.zeros(1).long(), (given["group"].diff() != 0).long().cumsum(0)]),
    ),
    "columns": Option(
        "rows are grouped as if those of a prompt stood a batch of prompts apart",
        lambda given: torch.arange(len(given["group"])) % len(given["group"].unique()),
    ),
    "next": Option("each row has the group of the row before it", lambda given: given["group"].roll(1)),
}
# How much each row counts in the statistics of its group.
ROWS = {
    "rollouts": Option("each rollout counts once", lambda given: 1.0 / _same(given["rollout"]).sum(1)),
    "rows": Option(
        "a rollout counts once for each of its rows", lambda given: torch.ones(len(given["group"])).double()
    ),
}
REJECTED = {
    "left out": Option(
        "rows whose mask is all 0 are in no baseline", lambda given: given["mask"].any(1).double(), ("counted",)
    ),
    "counted": Option(
        "rows whose mask is all 0 are in the baseline of the others",
        lambda given: torch.ones(len(given["group"])).double(),
    ),
    "as 0": Option("rows whose mask is all 0 are in the baseline of the others with a reward of 0", None),
}


def _same(group: Tensor) -> Tensor:
    return (group[:, None] == group).double()


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    """`[B]`, from the weights `[B, B]` of the rows that each row is compared with; 0 where there is none."""
    total = weights.sum(1)
    return (weights @ x) / torch.where(total == 0, 1.0, total)


def _others(weights: Tensor) -> Tensor:
    return weights * (1 - torch.eye(len(weights)).double())


def _extreme(r: Tensor, weights: Tensor, largest: bool) -> Tensor:
    every = r.expand_as(weights).where(weights > 0, -torch.inf if largest else torch.inf)
    return every.amax(1) if largest else every.amin(1)


def _median(r: Tensor, weights: Tensor) -> Tensor:
    return torch.stack([r[row > 0].median() if (row > 0).any() else r.new_zeros(()) for row in weights])


# Baselines from rewards, weights `[B, B]` and the case.
BASELINES = {
    "mean": Option("the mean of the group", lambda r, w, given: _mean(r, w)),
    "others": Option("the mean of the others in the group", lambda r, w, given: _mean(r, _others(w))),
    "length": Option(
        "the mean of the group weighted by length", lambda r, w, given: _mean(r, w * given["lengths"].double())
    ),
    "none": Option("no baseline", lambda r, w, given: torch.zeros_like(r)),
    "median": Option("the median of the group", lambda r, w, given: _median(r, w)),
    "most": Option("the largest of the group", lambda r, w, given: _extreme(r, w, True)),
    "least": Option("the smallest of the group", lambda r, w, given: _extreme(r, w, False)),
    "batch": Option("the mean of the batch", lambda r, w, given: r.mean().expand_as(r)),
    "sum": Option("the sum of the group", lambda r, w, given: w @ r),
    "one less": Option(
        "the group's sum over one less than its size",
        lambda r, w, given: (w @ r) / (w.sum(1) - 1).clamp(min=1),
    ),
    "one more": Option("the group's sum over one more than its size", lambda r, w, given: (w @ r) / (w.sum(1) + 1)),
}


def _std(r: Tensor, weights: Tensor, less: int) -> Tensor:
    squares = weights @ r.square() - 2 * _mean(r, weights) * (weights @ r) + weights.sum(1) * _mean(r, weights) ** 2
    return (squares.clamp(min=0) / (weights.sum(1) - less).clamp(min=1)).sqrt()


ALL_STDS = ("std", "population", "none", "batch")
# Divisors from rewards, centred rewards and weights `[B, B]`; where one is 0 nothing is divided.
NORMALIZATIONS = {
    "std": Option("the standard deviation of the group, N - 1", lambda r, a, w: _std(r, w, 1), ("population",)),
    "population": Option("the standard deviation of the group, N", lambda r, a, w: _std(r, w, 0), ("std",)),
    "none": Option("no division by a standard deviation (Dr. GRPO)", lambda r, a, w: torch.ones_like(r), ALL_STDS),
    "batch": Option(
        "the standard deviation of the batch's rewards", lambda r, a, w: r.std().expand_as(r), ("std", "population")
    ),
    "others": Option("the standard deviation of the others, N", lambda r, a, w: _std(r, _others(w), 0), ("none",)),
    "others, N - 1": Option(
        "the standard deviation of the others, N - 1", lambda r, a, w: _std(r, _others(w), 1), ("none",)
    ),
    "mean": Option("the mean of the group", lambda r, a, w: _mean(r, w)),
    "variance": Option("the variance of the group in place of its root", lambda r, a, w: _std(r, w, 1) ** 2),
    "moment": Option("the root mean square of the rewards, not centred", lambda r, a, w: _mean(r.square(), w).sqrt()),
    "range": Option("largest less smallest of the group", lambda r, a, w: _extreme(r, w, True) - _extreme(r, w, False)),
    "absolute": Option("the mean absolute deviation of the group", lambda r, a, w: _mean_absolute(r, w)),
    "sum": Option("the root of the sum of squares", lambda r, a, w: _std(r, w, 0) * w.sum(1).sqrt()),
    "error": Option("the standard error of the group's mean", lambda r, a, w: _std(r, w, 1) / w.sum(1).sqrt()),
    "multiplied": Option("multiplied by the standard deviation", lambda r, a, w: 1 / (_std(r, w, 1) + 1e-12)),
}


def _mean_absolute(r: Tensor, weights: Tensor) -> Tensor:
    return _mean_of_rows((r[None] - _mean(r, weights)[:, None]).abs(), weights)


def _mean_of_rows(x: Tensor, weights: Tensor) -> Tensor:
    return (weights * x).sum(1) / weights.sum(1).clamp(min=1)


EPSILONS = {f"{eps:g}": Option(f"{eps:g} is added to the divisor", eps, ("1e-06",)) for eps in (1e-6, 1e-5, 1e-4, 1e-3)}
SIGNS = {
    "own": Option("more reward, more advantage", lambda x: x),
    "minus": Option("the sign is turned", lambda x: -x),
}
LONE = {
    "0": Option("a group of one has the advantage 0", lambda r: torch.zeros_like(r)),
    "reward": Option("a group of one keeps its reward", lambda r: r, ("0",)),
}
AFTERWARDS = {
    "none": Option("not whitened over the batch afterwards", lambda a: a),
    "batch": Option("whitened over the batch afterwards", lambda a: (a - a.mean()) / a.std(), ("none",)),
    "centred": Option("centred over the batch afterwards", lambda a: a - a.mean()),
}
GROUP_TERMS: Mapping[str, Mapping[str, Option]] = {
    "sign": SIGNS,
    "group": GROUPS,
    "rows of a rollout": ROWS,
    "baseline": BASELINES,
    "normalization": NORMALIZATIONS,
    "epsilon": EPSILONS,
    "baseline of rejected rows": REJECTED,
    "group of one": LONE,
    "whitening": AFTERWARDS,
}


def group_advantages(given: Given, choice: Choice) -> Tensor:
    """`[B]` float64."""
    r = given["rewards"].double()
    rejected = choice["baseline of rejected rows"]
    if rejected == "as 0":
        r, counted = r.where(given["mask"].any(1), 0.0), torch.ones_like(r)
    else:
        counted = REJECTED[rejected](given)
    weights = _same(GROUPS[choice["group"]](given)) * ROWS[choice["rows of a rollout"]](given) * counted
    centred = r - BASELINES[choice["baseline"]](r, weights, given)
    divisor = NORMALIZATIONS[choice["normalization"]](r, centred, weights)
    eps = 0.0 if choice["normalization"] == "none" else EPSILONS[choice["epsilon"]].compute
    scaled = centred / torch.where(divisor > 1e-9, divisor + eps, 1.0)
    alone = (weights > 0).sum(1) < 2
    scaled = torch.where(alone, LONE[choice["group of one"]](r), scaled)
    return SIGNS[choice["sign"]](AFTERWARDS[choice["whitening"]](scaled))


def _group_reference(view: View, choice: Choice) -> Tensor:
    cut = [view.given] if view.cut == "whole" else view.parts()
    rows = torch.cat([group_advantages(given, choice) for given in cut])
    order = torch.tensor([row for part in view.case.parts for row in part]).argsort() if view.cut != "whole" else None
    rows = rows if order is None else rows[order]
    return rows if view.form == "rows" else rows[:, None].expand_as(view.given["mask"])


def _rows_or_tokens(view: View, output: Tensor) -> Tensor:
    mask = view.given["mask"] != 0
    return output[mask.any(1)] if view.form == "rows" else output[mask]


STEPS = {
    "over": Option("tokens that do not count are stepped over", None),
    "reset": Option("the return is reset at each token that does not count", None),
    "counted": Option("tokens that do not count are steps, with a discount each", None),
    "raw values": Option("values at tokens that do not count are bootstrapped from", None),
    "ignored": Option("no mask, so rewards and values of padding flow into earlier tokens", None),
}
PLACES = {
    "last": Option("the score is the reward of the last token that counts", None),
    "end": Option("the score stands on the last position, whether it counts or not", None),
    "after": Option("the score stands on the first position after the end, as one more step", None, ("last",)),
    "first": Option("the score stands on the first token", None),
    "everywhere": Option("the score stands on every token", None),
}
DISCOUNTS = {
    "own": Option("gamma and lambda", lambda g, lam: (g, lam)),
    "swapped": Option("gamma and lambda are swapped", lambda g, lam: (lam, g)),
    "no gamma": Option("gamma is 1", lambda g, lam: (1.0, lam)),
    "no lambda": Option("lambda is 1", lambda g, lam: (g, 1.0)),
    "lambda 0": Option("one temporal difference in place of their sum", lambda g, lam: (g, 0.0)),
}
TIMES = {
    "next": Option("the value of the next token", None),
    "own value": Option("the token's own value in place of the next one's", None),
    "previous": Option("values are one token late", None),
    "early": Option("values are one token early", None),
    "forward": Option("returns are summed from the start in place of to the end", None),
    "immediate": Option("each token has its own reward alone", None),
    "after": Option("the return of what comes after the token, without its own reward", None),
}
VALUES = {
    "subtracted": Option("values are subtracted", None),
    "added": Option("returns in place of advantages", None),
    "ignored": Option("values are not read", None),
}
WHITENINGS = {
    "none": Option("not whitened", None, ("batch", "population")),
    "batch": Option("whitened over the batch, N - 1", None, ("none", "population")),
    "population": Option("whitened over the batch, N", None, ("none", "batch")),
    "row": Option("whitened over each row by itself", None),
    "centred": Option("centred over the batch and not scaled", None),
    "padding": Option("whitened over all positions, padding too", None),
}
TOKEN_TERMS: Mapping[str, Mapping[str, Option]] = {
    "sign": SIGNS,
    "mask": STEPS,
    "position": PLACES,
    "discount": DISCOUNTS,
    "bootstrap": TIMES,
    "baseline": VALUES,
    "normalization": WHITENINGS,
}


def token_advantages(given: Given, choice: Choice) -> Tensor:
    """`[B, T]` float64, by generalized advantage estimation; returns where the values are not read."""
    own, values = given["mask"] != 0, given["values"].double()
    if choice["baseline"] == "ignored":
        values = torch.zeros_like(values)
    gamma, lam = DISCOUNTS[choice["discount"]].compute(given["gamma"], given["lam"])
    steps, time = choice["mask"], choice["bootstrap"]
    raw = _placed(given, choice["position"])
    r = raw if steps == "ignored" else raw.where(own | (choice["position"] != "last"), 0.0)
    v = values if steps in ("raw values", "ignored") else values.where(own, 0.0)
    if time in ("previous", "early"):
        v = v.roll(1 if time == "previous" else -1, 1)
    counts = own if steps in ("over", "reset") else torch.ones_like(own)
    if choice["position"] == "after":
        counts = counts | (torch.arange(v.shape[1]) == _after(own)[:, None])
    advantages, last, next_value = torch.zeros_like(v), v.new_zeros(len(v)), v.new_zeros(len(v))
    last_reward = v.new_zeros(len(v))
    width = v.shape[1]
    for t in range(width) if time == "forward" else reversed(range(width)):
        reward = last_reward if time == "after" else r[:, t]
        delta = reward + gamma * (v[:, t] if time == "own value" else next_value) - v[:, t]
        here = delta + (0.0 if time == "immediate" else gamma * lam * last)
        skipped = torch.zeros_like(last) if steps == "reset" else last
        last = torch.where(counts[:, t], here, skipped)
        next_value = torch.where(counts[:, t], v[:, t], next_value)
        last_reward = torch.where(counts[:, t], r[:, t], last_reward)
        advantages[:, t] = last
    if choice["baseline"] == "added":
        advantages = advantages + v
    return SIGNS[choice["sign"]](whitened(advantages, own.double(), choice["normalization"]))


def _placed(given: Given, place: str) -> Tensor:
    """Rewards of tokens, with the score of each row, if it is given by itself, at its place."""
    rewards: Tensor = given["token_rewards"].double()
    if place == "last":
        return rewards
    mask, width = given["mask"] != 0, rewards.shape[1]
    scores: Tensor = given["rewards"].double()
    places = torch.arange(width).expand_as(rewards)
    after = _after(mask)
    at = {"end": torch.full_like(after, width - 1), "after": after, "first": 0 * after}
    if place == "everywhere":
        return scores[:, None].expand_as(rewards)
    return scores[:, None] * (places == at[place][:, None])


def _after(mask: Tensor) -> Tensor:
    """`[B]`, the first position after the last that counts; the last one, where that is it."""
    width = mask.shape[1]
    return ((torch.arange(width) * mask).amax(1) + 1).clamp(max=width - 1)


def whitened(x: Tensor, mask: Tensor, over: str) -> Tensor:
    """`x` `[B, T]` less its mean, over its standard deviation."""
    if over == "none":
        return x
    counted = torch.ones_like(mask) if over == "padding" else mask
    if over == "row":
        counts = counted.sum(1, keepdim=True).clamp(min=1)
        mean = (x * counted).sum(1, keepdim=True) / counts
        squares = ((x - mean).square() * counted).sum(1, keepdim=True) / (counts - 1).clamp(min=1)
    else:
        counts = counted.sum()
        mean = (x * counted).sum() / counts
        squares = ((x - mean).square() * counted).sum() / (counts if over == "population" else counts - 1)
    return x - mean if over == "centred" else (x - mean) / torch.where(squares > 0, squares.sqrt(), 1.0)


OVER = {
    "batch": Option("over the whole batch", None, ("row",)),
    "row": Option("over each row by itself", None, ("batch",)),
    "column": Option("statistics of rows are laid along tokens: x_ij less the mean of row j", None),
    "position": Option("over each position of all rows", None),
    "part": Option("over each part of the batch by itself", None),
}
DIVISORS = {
    "N - 1": Option(
        "divided by the standard deviation, N - 1", lambda x, m, over: _spread(x, m, over, 1), ("N", "none")
    ),
    "N": Option("divided by the standard deviation, N", lambda x, m, over: _spread(x, m, over, 0), ("N - 1", "none")),
    "none": Option("not divided", lambda x, m, over: torch.ones_like(x), ("N - 1", "N")),
    "variance": Option("divided by the variance", lambda x, m, over: _spread(x, m, over, 1) ** 2),
    "moment": Option(
        "divided by the root mean square, not centred", lambda x, m, over: _moment(x.square(), m, over).sqrt()
    ),
}
CENTRES = {
    "mean": Option("the mean is subtracted", lambda x, m, over: _moment(x, m, over)),
    "none": Option("the mean is not subtracted", lambda x, m, over: torch.zeros_like(x)),
}
COUNTED = {
    "mask": Option("entries that count", lambda m: m),
    "all": Option("the mask is ignored", lambda m: torch.ones_like(m)),
}
WHITENING_TERMS: Mapping[str, Mapping[str, Option]] = {
    "group": OVER,
    "normalization": DIVISORS,
    "baseline": CENTRES,
    "mask": COUNTED,
    "sign": SIGNS,
}


def _moment(x: Tensor, mask: Tensor, over: str) -> Tensor:
    """The mean of the entries that count, in the shape of `x`."""
    if x.dim() == 1 or over in ("batch", "part"):
        return ((x * mask).sum() / mask.sum().clamp(min=1)).expand_as(x)
    along = 0 if over == "position" else 1
    mean = (x * mask).sum(along) / mask.sum(along).clamp(min=1)
    laid = mean[None] if over in ("column", "position") else mean[:, None]
    if over == "column" and x.shape[0] != x.shape[1]:
        return x * torch.nan  # it cannot be laid so
    return laid.expand_as(x)


def _spread(x: Tensor, mask: Tensor, over: str, less: int) -> Tensor:
    centred = (x - _moment(x, mask, "row" if over == "column" else over)).square()
    size = _moment(mask, torch.ones_like(mask), over) * (
        mask.numel() if x.dim() == 1 or over in ("batch", "part") else mask.shape[0 if over == "position" else 1]
    )
    squares = _moment(centred, mask, over) * size / (size - less).clamp(min=1)
    return torch.where(squares > 0, squares.sqrt(), 1.0)


def _whitening_reference(view: View, choice: Choice) -> Tensor:
    over = choice["group"]
    cut = view.cut != "whole" and over == "part"
    pieces = []
    for given in view.parts() if cut else [view.given]:
        x, mask = given["x"].double(), COUNTED[choice["mask"]](given["mask"])
        centred = x - CENTRES[choice["baseline"]](x, mask, over)
        divisor = DIVISORS[choice["normalization"]](x, mask, over)
        pieces.append(SIGNS[choice["sign"]](centred / divisor))
    order = torch.tensor([row for part in view.case.parts for row in part]).argsort() if cut else slice(None)
    return torch.cat(pieces)[order]


def _counted(view: View, output: Tensor) -> Tensor:
    return output[view.given["mask"] != 0]


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _rows(rewards: Sequence[float], group: Sequence[int], lengths: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """Rows with their rewards, on the last token that counts as well."""
    number = len(rewards)
    length = torch.tensor(lengths or [1 + (3 * row + 1) % 4 for row in range(number)])
    places = torch.arange(5).expand(number, 5)
    r = torch.tensor(rewards, dtype=torch.float64)
    given = {
        "rewards": r,
        "group": torch.tensor(group),
        "rollout": torch.arange(number),
        "lengths": length,
        "mask": (places < length[:, None]).double(),
        "token_rewards": r[:, None] * (places == (length - 1).clamp(min=0)[:, None]),
        "group_size": max(list(group).count(each) for each in group),
    }
    return {**given, **more}


PAIRS = "each group must have two rows or more that count"


def group_cases() -> list[Case]:
    """Batches for advantages of groups, from the one in which the fewest terms matter."""
    rejected = _rows([9.0, 1.0, 0.2, 0.5, 0.7, -4.0], [0, 0, 0, 1, 1, 1], [3, 2, 4, 1, 4, 2])
    rejected["mask"] = rejected["mask"] * torch.tensor([0, 1, 1, 1, 1, 0])[:, None]
    alone = _rows([9.0, 1.0, 0.2, 0.5, 0.7], [0, 0, 1, 1, 1], [3, 2, 4, 1, 4])
    alone["mask"] = alone["mask"] * torch.tensor([0, 1, 1, 1, 1])[:, None]
    cut = _rows([1.0, 1.0, 1.0, 0.0, 0.4, 0.4, 0.9], [0, 0, 0, 0, 1, 1, 1], rollout=torch.tensor([0, 0, 0, 1, 2, 2, 3]))
    flat = [x for x in (0.3, 0.35, 0.4, 0.7, 0.95) for _ in range(8)]
    one = [0.0 if number % 8 == 0 else x for number, x in enumerate(flat)]
    ids = [number // 8 for number in range(40)]
    float32 = {name: _rows(rows, ids) for name, rows in (("flat", flat), ("one", one))}
    for given in float32.values():
        given.update(rewards=given["rewards"].float(), token_rewards=given["token_rewards"].float())
    return [
        Case("one group", "baseline", _rows([1.0, 0.0, 0.25, 0.6], [0] * 4), is_even=True),
        Case(
            "groups of one size",
            "group",
            _rows([1.0, 0.0, 0.3, 2.0, 5.0, 2.5], [0, 0, 0, 1, 1, 1]),
            ((0, 1, 2), (3, 4, 5)),
            is_even=True,
        ),
        Case(
            "groups of different sizes", "group", _rows([1.0, 3.0, 0.5, 5.0, 4.0], [0, 0, 0, 1, 1]), ((0, 1, 2), (3, 4))
        ),
        Case("rows of a group apart", "group", _rows([1.0, 5.0, 0.0, 2.0, 0.6, 2.2], [4, 7, 4, 7, 4, 7])),
        Case("rollouts cut into rows", "rows of a rollout", cut, needs="rollout"),
        Case("a row that is rejected", "baseline of rejected rows", rejected, needs="mask"),
        Case("a group of one", "group of one", _rows([1.0, 3.0, 5.0], [0, 0, 1]), edge=PAIRS),
        Case("all others rejected", "baseline of rejected rows", alone, edge=PAIRS, needs="mask"),
        Case("equal rewards in float32", "normalization", float32["flat"], is_even=True, tolerance=0.1),
        Case("one reward among equals in float32", "normalization", float32["one"], is_even=True, tolerance=0.1),
    ]


def token_cases() -> list[Case]:
    """Batches for advantages along tokens."""

    def made(mask: Sequence[Sequence[int]], seed: int, junk: float, dense: bool) -> dict[str, Any]:
        m = torch.tensor(mask).double()
        values, rewards = _drawn(*m.shape, seed=seed), _drawn(*m.shape, seed=seed + 50)
        scores = _drawn(len(m), seed=seed + 90)
        last = (m != 0) & (m.flip(1).cumsum(1).flip(1) == 1)
        placed = rewards if dense else torch.where(last, scores[:, None], 0.0)
        return {
            "rewards": scores,
            "token_rewards": placed.where(m != 0, junk),
            "values": values.where(m != 0, 4 * junk),
            "mask": m,
            "group": torch.arange(len(m)),
            "lengths": m.sum(1),
            "ids": torch.randint(2, 9, m.shape, generator=torch.Generator().manual_seed(seed)),
        }

    full, padded = [[1] * 5] * 3, [[1, 1, 1, 0, 0], [1] * 5, [1, 1, 0, 0, 0]]
    holes = [[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 0], [1, 1, 1, 0, 1, 0]]
    every = [
        Case("rows of one token", "bootstrap", made([[1]] * 3, 9, 0.0, False)),
        Case("rows of one length", "discount", made(full, 1, 0.0, False)),
        Case("padding", "position", made(padded, 2, 0.0, False)),
        Case("tokens of a tool", "mask", made(holes, 3, 0.0, False)),
        Case("values under the mask", "mask", made(holes, 5, 0.0, False) | {"values": _drawn(3, 6, seed=6)}),
        Case("rewards of tokens", "mask", made(full, 7, 0.0, True), needs="token_rewards"),
        Case("rewards of padding", "mask", made(padded, 8, 1.5, True), needs="token_rewards"),
    ]
    for case in every:
        labels = case.given["ids"].where(case.given["mask"] != 0, -100)
        case.given.update(labels=labels)  # type: ignore[attr-defined]
    return every


def _whitening_cases() -> list[Case]:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).double()
    square = torch.tensor([[1.0, 3.0, 0.5], [5.0, 9.0, 2.0], [0.0, 1.0, 7.0]]).double()
    return [
        Case(
            "one sequence",
            "group",
            {"x": torch.tensor([0.0, 4.0, 5.0, 0.5]).double(), "mask": torch.ones(4).double()},
            ((0, 3), (1, 2)),
            edge="it takes no single sequence",
        ),
        Case("as many rows as tokens", "group", {"x": square, "mask": torch.ones(3, 3).double()}),
        Case(
            "rows of one length",
            "group",
            {"x": _drawn(4, 3, seed=1), "mask": torch.ones(4, 3).double()},
            ((0, 1), (2, 3)),
        ),
        Case("padding", "mask", {"x": _drawn(3, 4, seed=2), "mask": mask}, ((0, 1), (2,))),
    ]


GROUP = Interface(
    "advantages",
    group_cases(),
    GROUP_TERMS,
    _group_reference,
    _rows_or_tokens,
    "groups of one size",
    properties.GROUP,
    needs={"rows of a rollout": "rollout", "baseline of rejected rows": "mask"},
)
TOKENS = Interface(
    "advantages",
    token_cases(),
    TOKEN_TERMS,
    lambda view, choice: token_advantages(view.given, choice),
    _counted,
    "tokens of a tool",
    properties.TOKENS,
    needs={"position": "rewards"},
)
WHITENING = Interface(
    "normalization",
    _whitening_cases(),
    WHITENING_TERMS,
    _whitening_reference,
    _counted,
    "padding",
    properties.WHITENING,
)
