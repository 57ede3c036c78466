"""References for advantages and whitening: baselines of groups and returns along tokens, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlflow.conform import properties
from rlflow.conform.terms import Case, Choice, Given, Interface, Option, View

# An option is a function of `q`, which has the quantities of a case and what terms before it gave.
# Which rows are compared: numbers, equal for rows of one group.
GROUPS = {
    "prompt": Option("rows of the same prompt", lambda q: q.group),
    "batch": Option("one baseline is shared by all prompts", lambda q: torch.zeros_like(q.group)),
    "chunks": Option(
        "rows are cut into groups of one size in order, whatever their prompt",
        lambda q: torch.arange(len(q.group)) // q.group_size,
    ),
    "columns": Option(
        "rows are grouped as if those of a prompt stood a batch of prompts apart",
        lambda q: torch.arange(len(q.group)) % len(q.group.unique()),
    ),
}
# How much each row counts in the statistics of its group.
ROWS = {
    "rollouts": Option("each rollout counts once", lambda q: 1.0 / _same(q.rollout).sum(1)),
    "rows": Option("a rollout counts once for each of its rows", lambda q: torch.ones_like(q.r)),
}
REJECTED = {
    "left out": Option("rows whose mask is all 0 are in no baseline", lambda q: q.mask.any(1).double(), ("counted",)),
    "counted": Option("rows whose mask is all 0 are in the baseline of the others", lambda q: torch.ones_like(q.r)),
}


def _same(group: Tensor) -> Tensor:
    return (group[:, None] == group).double()


def _mean(x: Tensor, weights: Tensor) -> Tensor:
    """`[B]`, from the weights `[B, B]` of the rows that each row is compared with; 0 where there is none."""
    total = weights.sum(1)
    return (weights @ x) / torch.where(total == 0, 1.0, total)


def _std(r: Tensor, weights: Tensor, less: int) -> Tensor:
    squares = weights @ r.square() - 2 * _mean(r, weights) * (weights @ r) + weights.sum(1) * _mean(r, weights) ** 2
    return (squares.clamp(min=0) / (weights.sum(1) - less).clamp(min=1)).sqrt()


# Baselines from rewards r, the weights w `[B, B]` of the rows of a group, and those of the other rows.
BASELINES = {
    "mean": Option("the mean of the group", lambda q: _mean(q.r, q.w)),
    "others": Option("the mean of the others in the group", lambda q: _mean(q.r, q.others)),
    "length": Option("the mean of the group weighted by length", lambda q: _mean(q.r, q.w * q.lengths.double())),
    "none": Option("no baseline", lambda q: torch.zeros_like(q.r)),
    "batch": Option("the mean of the batch", lambda q: q.r.mean().expand_as(q.r)),
}
ALL_STDS = ("std", "population", "none", "batch")
# Divisors; where one is 0 nothing is divided.
NORMALIZATIONS = {
    "std": Option("the standard deviation of the group, N - 1", lambda q: _std(q.r, q.w, 1), ("population",)),
    "population": Option("the standard deviation of the group, N", lambda q: _std(q.r, q.w, 0), ("std",)),
    "none": Option("no division by a standard deviation (Dr. GRPO)", lambda q: torch.ones_like(q.r), ALL_STDS),
    "batch": Option(
        "the standard deviation of the batch's rewards", lambda q: q.r.std().expand_as(q.r), ("std", "population")
    ),
    "others": Option("the standard deviation of the others, N", lambda q: _std(q.r, q.others, 0), ("none",)),
    "others, N - 1": Option("the standard deviation of the others, N - 1", lambda q: _std(q.r, q.others, 1), ("none",)),
    "mean": Option("the mean of the group", lambda q: _mean(q.r, q.w)),
    "variance": Option("the variance of the group in place of its root", lambda q: _std(q.r, q.w, 1) ** 2),
}
EPSILONS = {
    f"{eps:g}": Option(f"{eps:g} is added to the divisor", lambda q, eps=eps: eps, ("1e-06",))
    for eps in (1e-6, 1e-5, 1e-4, 1e-3)
}
LONE = {
    "0": Option("a group of one has the advantage 0", lambda q: torch.where(q.compared < 2, 0.0, q.a)),
    "reward": Option("a group of one keeps its reward", lambda q: torch.where(q.compared < 2, q.r, q.a), ("0",)),
    "reward of one": Option(
        "a row without others keeps its reward, and one whose others are rejected has the advantage 0",
        lambda q: torch.where(_same(q.group).sum(1) < 2, q.r, torch.where(q.compared < 2, 0.0, q.a)),
        ("0",),
    ),
}
AFTERWARDS = {
    "none": Option("not whitened over the batch afterwards", lambda q: q.a),
    "batch": Option("whitened over the batch afterwards", lambda q: (q.a - q.a.mean()) / q.a.std(), ("none",)),
}
SIGNS = {
    "own": Option("more reward, more advantage", lambda q: q.a),
    "minus": Option("the sign is turned", lambda q: -q.a),
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
    """The right advantages of rows that are compared in groups, `[B]` float64."""
    q = SimpleNamespace(**given)
    q.r = q.rewards.double()
    counts = ROWS[choice["rows of a rollout"]](q) * REJECTED[choice["baseline of rejected rows"]](q)
    q.w = _same(GROUPS[choice["group"]](q)) * counts
    q.others, q.compared = q.w * (1 - torch.eye(len(q.w)).double()), (q.w > 0).sum(1)
    divisor = NORMALIZATIONS[choice["normalization"]](q)
    eps = 0.0 if choice["normalization"] == "none" else EPSILONS[choice["epsilon"]](q)
    q.a = (q.r - BASELINES[choice["baseline"]](q)) / torch.where(divisor > 1e-9, divisor + eps, 1.0)
    for term, options in (("group of one", LONE), ("whitening", AFTERWARDS), ("sign", SIGNS)):
        q.a = options[choice[term]](q)
    return torch.as_tensor(q.a)


def _group_reference(view: View, choice: Choice) -> Tensor:
    cut = [view.given] if view.cut == "whole" else view.parts()
    rows = view.in_order([group_advantages(given, choice) for given in cut])
    return rows if view.form == "rows" else rows[:, None].expand_as(view.given["mask"])


def _rows_or_tokens(view: View, output: Tensor) -> Tensor:
    mask = view.given["mask"] != 0
    return output[mask.any(1)] if view.form == "rows" else output[mask]


# What a token that does not count does: (is a step, ends the return, its reward counts, its value counts).
STEPS = {
    "over": Option("tokens that do not count are stepped over", (False, False, False, False)),
    "reset": Option("the return is reset at each token that does not count", (False, True, False, False)),
    "counted": Option("tokens that do not count are steps, with a discount each", (True, False, False, False)),
    "raw values": Option("values at tokens that do not count are bootstrapped from", (True, False, False, True)),
    "ignored": Option("no mask, so rewards and values of padding flow into earlier tokens", (True, False, True, True)),
}
PLACES = {
    "last": Option("the score is the reward of the last token that counts", lambda q: q.token_rewards),
    "end": Option(
        "the score stands on the last position, whether it counts or not", lambda q: _placed(q, q.mask.shape[1] - 1)
    ),
    "after": Option(
        "the score stands on the first position after the end, as one more step",
        lambda q: _placed(q, q.after[:, None]),
        ("last",),
    ),
    "first": Option("the score stands on the first token", lambda q: _placed(q, 0)),
    "everywhere": Option("the score stands on every token", lambda q: q.rewards[:, None].expand_as(q.token_rewards)),
}
# gamma and lambda of the temporal difference, and of the sum of differences.
DISCOUNTS = {
    "own": Option("gamma and lambda", lambda g, lam: (g, g * lam)),
    "swapped": Option("gamma and lambda are swapped", lambda g, lam: (lam, g * lam)),
    "no gamma": Option("gamma is 1", lambda g, lam: (1.0, lam)),
    "of the sum": Option("gamma is left out of the temporal difference", lambda g, lam: (1.0, g * lam)),
    "no lambda": Option("lambda is 1", lambda g, lam: (g, g)),
    "lambda 0": Option("one temporal difference in place of their sum", lambda g, lam: (g, 0.0)),
    "both": Option("the temporal difference is discounted by lambda too", lambda g, lam: (g * lam, g * lam)),
}
TIMES = {
    "next": Option("the value of the next token", None),
    "own value": Option("the token's own value in place of the next one's", None),
    "previous": Option("values are one token late", None),
    "early": Option("values are one token early", None),
    "end": Option("the last value of a row is bootstrapped from after its end", None),
    "forward": Option("returns are summed from the start in place of to the end", None),
    "rows": Option("the return goes on from one row to the row before it", None),
}
VALUES = {
    "subtracted": Option("values are subtracted", None),
    "added": Option("returns in place of advantages", None),
    "ignored": Option("values are not read", None),
}
# What is subtracted from x `[B, T]`, and the divisor, from the mask m of the entries that count.
WHITENINGS = {
    "none": Option("not whitened", lambda x, m: x, ("batch", "population")),
    "batch": Option("whitened over the batch, N - 1", lambda x, m: _white(x, m, 1), ("none", "population")),
    "population": Option("whitened over the batch, N", lambda x, m: _white(x, m, 0), ("none", "batch")),
    "row": Option("whitened over each row by itself", lambda x, m: _white(x, m, 1, along=1)),
    "centred": Option("centred over the batch and not scaled", lambda x, m: x - (x * m).sum() / m.sum()),
    "padding": Option("whitened over all positions, padding too", lambda x, m: _white(x, torch.ones_like(m), 1)),
    "zeros": Option(
        "whitened over all positions, with padding as 0", lambda x, m: _white(x * m, torch.ones_like(m), 1)
    ),
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


def _placed(q: Any, at: Any) -> Tensor:
    """The score of each row at one position, `[B, T]`."""
    return torch.as_tensor(q.rewards[:, None] * (torch.arange(q.mask.shape[1]).expand_as(q.mask) == at))


def _white(x: Tensor, mask: Tensor, less: int, along: int | None = None) -> Tensor:
    """`x` less its mean, over its standard deviation: of all entries that count, or along rows."""
    dims = (0, 1) if along is None else (along,)
    count = mask.sum(dims, keepdim=True)
    centred = x - (x * mask).sum(dims, keepdim=True) / count.clamp(min=1)
    squares = (centred.square() * mask).sum(dims, keepdim=True) / (count - less).clamp(min=1)
    return centred / torch.where(squares > 0, squares.sqrt(), 1.0)


def token_advantages(given: Given, choice: Choice) -> Tensor:
    """The right advantages of tokens, `[B, T]` float64: by GAE, or returns if values are not read."""
    q = SimpleNamespace(**{key: x.double() if isinstance(x, Tensor) else x for key, x in given.items()})
    own, width, time = q.mask != 0, q.mask.shape[1], choice["bootstrap"]
    q.after = ((torch.arange(width) * own).amax(1) + 1).clamp(max=width - 1)  # the end, or the last position
    is_step, ends, rewarded, valued = STEPS[choice["mask"]].compute
    gamma, decay = DISCOUNTS[choice["discount"]](q.gamma, q.lam)
    r = PLACES[choice["position"]](q)
    r = r if rewarded or choice["position"] != "last" else r.where(own, 0.0)
    v = q.values if valued else q.values.where(own, 0.0)
    v = torch.zeros_like(v) if choice["baseline"] == "ignored" else v
    v = v.roll({"previous": 1, "early": -1}.get(time, 0), 1)
    counts = torch.ones_like(own) if is_step else own
    if choice["position"] == "after":
        counts = counts | (torch.arange(width) == q.after[:, None])
    places = [(row, t) for row in reversed(range(len(v))) for t in reversed(range(width))]
    advantages, last, next_value = torch.zeros_like(v), v.new_zeros(()), v.new_zeros(())
    for row, t in reversed(places) if time == "forward" else places:
        if t == (0 if time == "forward" else width - 1) and time != "rows":
            last = v.new_zeros(())
            next_value = v[row, own[row].nonzero()[-1, 0]] if time == "end" else last
        if counts[row, t]:
            last = r[row, t] + gamma * (v[row, t] if time == "own value" else next_value) - v[row, t] + decay * last
            next_value = v[row, t]
        elif ends:
            last = torch.zeros_like(last)
        advantages[row, t] = last
    q.a = WHITENINGS[choice["normalization"]](advantages + (v if choice["baseline"] == "added" else 0.0), q.mask)
    return torch.as_tensor(SIGNS[choice["sign"]](q))


OVER = {
    "batch": Option("over the whole batch", None, ("row",)),
    "row": Option("over each row by itself", None, ("batch",)),
    "column": Option("statistics of rows are laid along tokens: x_ij less the mean of row j", None),
    "position": Option("over each position of all rows", None),
    "part": Option("over each part of the batch by itself", None),
}
# Divisors, from the deviations c from the mean and the mean over the entries that count.
DIVISORS = {
    "N - 1": Option("divided by the standard deviation, N - 1", lambda q: _spread(q, 1), ("N", "none")),
    "N": Option("divided by the standard deviation, N", lambda q: _spread(q, 0), ("N - 1", "none")),
    "none": Option("not divided", lambda q: torch.ones_like(q.x), ("N - 1", "N")),
    "variance": Option("divided by the variance", lambda q: _spread(q, 1) ** 2),
}
CENTRES = {
    "mean": Option("the mean is subtracted", lambda q: q.mean(q.x, q.m)),
    "none": Option("the mean is not subtracted", lambda q: torch.zeros_like(q.x)),
}
COUNTED = {
    "mask": Option("entries that count", lambda q: q.mask),
    "all": Option("the mask is ignored", lambda q: torch.ones_like(q.mask)),
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
    if over == "column" and x.shape[0] != x.shape[1]:
        return x * torch.nan  # it cannot be laid so
    return (mean[None] if over in ("column", "position") else mean[:, None]).expand_as(x)


def _spread(q: Any, less: int) -> Tensor:
    along = (
        q.m.numel() if q.x.dim() == 1 or q.over in ("batch", "part") else q.m.shape[0 if q.over == "position" else 1]
    )
    size = q.mean(q.m, torch.ones_like(q.m)) * along
    squares = q.mean((q.x - q.mean(q.x, q.m)).square(), q.m) * size / (size - less).clamp(min=1)
    return torch.where(squares > 0, squares.sqrt(), 1.0)


def _whitened(given: Given, choice: Choice) -> Tensor:
    q = SimpleNamespace(x=given["x"].double(), mask=given["mask"], over=choice["group"])
    q.m, q.mean = COUNTED[choice["mask"]](q), lambda x, m: _moment(x, m, q.over)
    q.a = (q.x - CENTRES[choice["baseline"]](q)) / DIVISORS[choice["normalization"]](q)
    return torch.as_tensor(SIGNS[choice["sign"]](q))


def _whitening_reference(view: View, choice: Choice) -> Tensor:
    if choice["group"] != "part" or view.cut == "whole":
        return _whitened(view.given, choice)
    return view.in_order([_whitened(given, choice) for given in view.parts()])


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
    (),
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
