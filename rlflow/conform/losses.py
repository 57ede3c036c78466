"""References for a loss and for the mean of a loss per token: PPO's surrogate and its kin, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlflow.conform import properties
from rlflow.conform.terms import Case, Choice, Given, Interface, Option, View
from rlflow.functional import gmpo_loss, kl_estimate, sapo_loss

# An option is a function of `q`, which has the quantities of a case, the settings, and what terms before it gave.
MODES = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant")
K3 = ("k3", "k3-ratio", "k2", "k3+")
EVERY_ROW = "sequence-mean-token-mean, of all rows"


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1]`, of the entries that count."""
    return (x.where(mask != 0, 0.0) * mask).sum(1, keepdim=True)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1]`, 0 in rows without an entry that counts."""
    return _sum(x, mask) / _nonzero(mask.sum(1, keepdim=True))


def _whitened(q: Any) -> Tensor:
    count: Tensor = q.mask.sum()
    centred: Tensor = q.advantages - _sum(q.advantages, q.mask).sum() / count
    return centred / (_sum(centred.square(), q.mask).sum() / (count - 1)).sqrt()


ADVANTAGES = {
    "given": Option("advantages as they are given", lambda q: q.advantages),
    "whitened": Option("advantages are whitened over the batch", _whitened, ("given",)),
}
POSITIONS = {
    "own": Option("old logprobs of the same token", lambda q: q.old_logprobs),
    "late": Option("old logprobs one token late", lambda q: q.old_logprobs.roll(1, 1)),
    "early": Option("old logprobs one token early", lambda q: q.old_logprobs.roll(-1, 1)),
    "row": Option("old logprobs of the row before", lambda q: q.old_logprobs.roll(1, 0)),
}
# Log ratios, from d = log pi - log old `[B, T]`.
RATIOS = {
    "token": Option("the ratio of each token", lambda q: q.d),
    "geometric": Option(
        "one ratio for each sequence, the geometric mean of its tokens'",
        lambda q: _row_mean(q.d, q.mask),
        ("sequence",),
    ),
    "sequence": Option(
        "one ratio for each sequence, the product of its tokens'", lambda q: _sum(q.d, q.mask), ("geometric",)
    ),
    "summed": Option(
        "the sum of the tokens' ratios in place of the ratio of the sequence",
        lambda q: _sum(q.d.exp(), q.mask).clamp(min=1e-9).log(),
    ),
    "padding": Option("padding counts in the ratio of a sequence", lambda q: q.d.mean(1, keepdim=True)),
    "inverse": Option("the ratio is old over new", lambda q: -q.d),
    "itself": Option("the ratio is to the policy itself, so always 1", lambda q: q.d - q.d.detach()),
}


def _lesser(q: Any, kept: Tensor) -> Tensor:
    """PPO's loss with another ratio in the place of the clipped one."""
    return -torch.minimum(q.r * q.a, kept * q.a)


def _kept(q: Any) -> Tensor:
    return torch.as_tensor(q.r.clamp(1 - q.low, 1 + q.high))


# Losses per token from the ratio r, advantages a and the two ends of the clip.
CLIPS = {
    "min": Option("min(r A, clip(r) A)", lambda q: _lesser(q, _kept(q))),
    "none": Option("no clip", lambda q: -q.r * q.a),
    "clamped": Option("clip(r) A without the min with r A", lambda q: -_kept(q) * q.a),
    "max": Option(
        "max where the objective has min, so the clip is on the other side",
        lambda q: -torch.maximum(q.r * q.a, _kept(q) * q.a),
    ),
    "swapped": Option(
        "the lower and the upper range of the clip are swapped",
        lambda q: _lesser(q, q.r.clamp(1 - q.high, 1 + q.low)),
    ),
    "weight": Option(
        "a detached ratio, cut from above, as the weight of A log pi",
        lambda q: -q.r.detach().clamp(max=1 + q.high) * q.a * q.logprobs,
        ("weight both",),
    ),
    "weight both": Option(
        "a detached ratio, cut at both ends, as the weight of A log pi",
        lambda q: -_kept(q).detach() * q.a * q.logprobs,
        ("weight",),
    ),
    "weight high": Option(
        "a detached ratio, cut at the upper range itself and not at 1 plus it, as the weight of A log pi",
        lambda q: -q.r.detach().clamp(max=q.high) * q.a * q.logprobs,
        ("weight",),
    ),
    "log pi": Option("A log pi without a ratio", lambda q: -q.a * q.logprobs),
    "sapo": Option("SAPO's gate", lambda q: sapo_loss(q.r.log(), torch.zeros_like(q.r), q.a)),
    "gmpo": Option(
        "GMPO's geometric mean",
        lambda q: gmpo_loss(q.r.log(), torch.zeros_like(q.r), q.a, q.mask, q.low, q.high)[:, None].expand_as(q.r),
    ),
}
DUALS = {
    "none": Option("no dual clip", lambda q: q.surrogate),
    "3": Option(
        "dual clip at 3 (arXiv 1912.09729)",
        lambda q: torch.where(q.a < 0, torch.minimum(q.surrogate, -3.0 * q.a), q.surrogate),
        ("none",),
    ),
}
# Divergences per token, from g = log ref - log pi.
KLS = {
    kind: Option(f"{kind} as the KL estimator", lambda q, kind=kind: kl_estimate(q.lp, q.ref, kind, q.old), other)
    for kind, other in {**dict.fromkeys(K3, K3), "k1": (), "abs": ()}.items()
}
KLS |= {
    "reversed": Option("k3 of the reference to the policy", lambda q: (-q.g).exp() - 1 + q.g),
    "twice": Option("twice k3", lambda q: 2 * kl_estimate(q.lp, q.ref, "k3")),
    "square": Option("the whole square of the log ratio, twice k2", lambda q: q.g.square()),
    "no 1": Option("k3 without its -1: the gradient is right, and the value is off by 1", lambda q: q.g.exp() - q.g),
    "none": Option("no KL", lambda q: torch.zeros_like(q.lp)),
}
SIGNS = {
    "minus": Option("the objective with a minus", lambda q: q.surrogate),
    "plus": Option("the objective without the minus, so it is descended", lambda q: -q.surrogate),
}
KL_SIGNS = {
    "plus": Option("KL is added", lambda q: q.kl),
    "minus": Option("KL is subtracted from what is minimised, so drift is rewarded", lambda q: -q.kl),
}
IMPORTANCES = {
    "truncate": Option("truncated at 2", lambda q: q.w.clamp(max=2.0), ("none",)),
    "none": Option("no correction for the sampler", lambda q: torch.ones_like(q.w), ("truncate",)),
    "uncut": Option("the sampler's correction is not truncated", lambda q: q.w, ("truncate",)),
    "of new": Option(
        "the sampler is corrected for by the policy in training, not by the old one",
        lambda q: (q.w * q.d.detach().exp()).clamp(max=2.0),
    ),
}


def _shifted(mask: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(mask, (by, -by))


def _last(mask: Tensor) -> Tensor:
    """Number of tokens that count from each token on, itself included."""
    return mask.flip(1).cumsum(1).flip(1)


# The mask by which a loss is summed and counted.
MASKS = {
    "tokens": Option("the mask of tokens that count", lambda q: q.mask),
    "none": Option("no mask, so padding counts", lambda q: torch.ones_like(q.mask)),
    "late": Option("the mask one token late", lambda q: _shifted(q.mask, 1)),
    "early": Option("the mask one token early", lambda q: _shifted(q.mask, -1)),
    "advantages": Option("advantages stand where the mask should", lambda q: q.a),
    "span": Option(
        "tokens between the first and the last that count, so a tool's too",
        lambda q: ((q.mask.cumsum(1) > 0) & (_last(q.mask) > 0)).to(q.mask.dtype),
    ),
}


def _per_row(x: Tensor, q: Any) -> Tensor:
    """The sum over rows divided by the number of rows that have a token that counts."""
    return x.sum() / _nonzero((q.m != 0).any(1).sum().to(x.dtype))


def _of_rollouts(q: Any, x: Tensor) -> Tensor:
    """The sum over rollouts of the mean over tokens."""
    same = (q.rollout.unique()[:, None] == q.rollout).to(x.dtype)
    means: Tensor = (same @ _sum(x, q.m)) / _nonzero(same @ q.m.sum(1, keepdim=True))
    return means.sum()


# One number from a loss per token x and the mask m by which it is summed.
DENOMINATORS = {
    "token-mean": Option("the mean over tokens", lambda q, x: _sum(x, q.m).sum() / _nonzero(q.m.sum()), MODES),
    "sequence-mean-token-mean": Option(
        "the mean over rows of the mean over tokens", lambda q, x: _per_row(_row_mean(x, q.m), q), MODES
    ),
    "sequence-mean-token-sum": Option(
        "the mean over rows of the sum over tokens", lambda q, x: _per_row(_sum(x, q.m), q), MODES
    ),
    "constant": Option(
        "the sum over the longest length allowed and the rows",
        lambda q, x: _sum(x, q.m).sum() / (q.max_length * len(x)),
        MODES,
    ),
    "sequence-mean": Option("the mean over rows", lambda q, x: _per_row(_row_mean(x, q.m), q)),
    EVERY_ROW: Option(
        "the mean over all rows, also those without a token, of the mean over tokens",
        lambda q, x: _row_mean(x, q.m).mean(),
        (*MODES, "sequence-mean"),
    ),
    "empty rows too": Option(
        "the mean over all rows, those without a token too, whose loss is that of a ratio of 1",
        lambda q, x: _row_mean(x, torch.where((q.m != 0).any(1, keepdim=True), q.m, 1.0)).mean(),
        ("sequence-mean",),
    ),
    "sequence-mean-token-sum, of all rows": Option(
        "the mean over all rows, also those without a token, of the sum over tokens",
        lambda q, x: _sum(x, q.m).sum() / len(x),
        MODES,
    ),
    "width": Option("the padded width counts: all positions", lambda q, x: _sum(x, q.m).sum() / x.numel()),
    "sum": Option("nothing divides the sum", lambda q, x: _sum(x, q.m).sum()),
}
OF_ROLLOUTS = {
    "rollouts": Option(
        "the mean over rollouts of the mean over tokens, whatever rows a rollout is cut into",
        lambda q, x: _of_rollouts(q, x) / len(q.rollout.unique()),
        MODES,
    ),
    "rollouts over rows": Option(
        "the means over the tokens of rollouts, summed and divided by the rows",
        lambda q, x: _of_rollouts(q, x) / len(x),
        MODES,
    ),
}
KL_DENOMINATORS = {
    "same": Option("KL is counted as the surrogate is", None),
    "padding": Option("the mean of KL is over all positions, so padding counts", lambda q, x: x.mean()),
    **{
        name: Option(f"the mean of KL is another than the surrogate's: {option.text}", option.compute)
        for name, option in DENOMINATORS.items()
        if name in (*MODES, EVERY_ROW, "width", "sum")
    },
}
# What divides the parts of a batch: which summands each part divides by its own count, and how often the whole counts.
SURROGATE, KL, BOTH = ("surrogate",), ("kl",), ("surrogate", "kl")
COUNTS = {
    "whole": Option("the count of the whole batch", ()),
    "part": Option("each part divides by its own count", BOTH),
    "part, averaged": Option("each part divides by its own count, and the parts are averaged", BOTH),
    "part, KL": Option("each part divides its KL by its own count", KL),
    "part, surrogate": Option(
        "each part divides its surrogate by its own count, and its KL by that of the batch", SURROGATE
    ),
    "averaged": Option("sums that were divided by the count of the whole batch are averaged over the parts", ()),
    "times parts": Option("the value is that of the whole times the number of parts", ()),
}
WEIGHTED = {"weighted": Option("each part's mean is weighted by its tokens before the selection", BOTH)}
AGGREGATION_COUNTS = {name: COUNTS[name] for name in COUNTS if name not in ("part, KL", "part, surrogate")} | WEIGHTED
SELECTIONS = {
    "none": Option("no selection", None),
    "whole": Option("tokens are selected in the whole batch", None),
    "part": Option("tokens are selected in each part by itself", None),
}
RANGES = {
    "given": Option("the clip's range", None),
    **{
        f"{low:g}, {high:g}": Option(f"the clip's range is {low:g} down and {high:g} up", None, ("given",))
        for low, high in ((0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4))
    },
}
LOSS_TERMS: Mapping[str, Mapping[str, Option]] = {
    "sign": SIGNS,
    "position": POSITIONS,
    "mask": MASKS,
    "denominator": DENOMINATORS,
    "ratio": RATIOS,
    "clip": CLIPS,
    "clip range": RANGES,
    "dual clip": DUALS,
    "KL estimator": KLS,
    "sign of KL": KL_SIGNS,
    "denominator of KL": KL_DENOMINATORS,
    "normalization": ADVANTAGES,
    "importance weights": IMPORTANCES,
    "denominator of micro-batches": COUNTS,
    "denominator of ranks": COUNTS,
}


def loss_per_token(given: Given, choice: Choice) -> Any:
    """Quantities of a batch with `surrogate`, `kl`, and the mask `m` by which they are summed, `[B, T]` each."""
    q = SimpleNamespace(**given)
    if "loss" in given:
        q.a = q.surrogate = q.loss
        q.surrogate, q.kl = SIGNS[choice["sign"]](q), torch.zeros_like(q.loss)
    else:
        q.low, q.high = q.clip_low, q.clip_high
        if choice["clip range"] != "given":
            q.low, q.high = (float(x) for x in choice["clip range"].split(", "))
        q.lp, q.ref, q.g = q.logprobs, q.ref_logprobs, q.ref_logprobs - q.logprobs
        q.a, q.old = ADVANTAGES[choice["normalization"]](q), POSITIONS[choice["position"]](q)
        q.d = q.lp - q.old
        q.r = RATIOS[choice["ratio"]](q).expand_as(q.lp).clamp(-20, 20).exp()
        q.w = (q.old - q.rollout_logprobs).clamp(-20, 20).exp()
        for term, options in (("clip", CLIPS), ("dual clip", DUALS), ("sign", SIGNS)):
            q.surrogate = options[choice[term]](q)
        q.surrogate = q.surrogate * IMPORTANCES[choice["importance weights"]](q)
        q.kl = q.kl_coef * KLS[choice["KL estimator"]](q)
        q.kl = KL_SIGNS[choice["sign of KL"]](q)
    q.m = MASKS[choice["mask"]](q)
    return q


def batch_loss(given: Given, choice: Choice, only: Sequence[str] = BOTH) -> Tensor:
    """The loss of a batch, 0-dim; or only the part of the surrogate or of the KL."""
    q = loss_per_token(given, choice)
    divided = (DENOMINATORS | OF_ROLLOUTS)[choice["denominator"]]
    of_kl = choice.get("denominator of KL", "same")
    loss: Tensor = divided(q, q.surrogate) if "surrogate" in only else q.surrogate.new_zeros(())
    return loss + (divided if of_kl == "same" else KL_DENOMINATORS[of_kl])(q, q.kl) if "kl" in only else loss


def _reference(view: View, choice: Choice) -> Tensor:
    if view.form == "tokens":
        q = loss_per_token(view.given, choice)
        return torch.as_tensor(q.surrogate + q.kl)
    view = _selected(view, choice.get("selection", "none"))
    count, parts = "whole" if view.cut == "whole" else choice[f"denominator of {view.cut}"], view.parts()
    own: tuple[str, ...] = (COUNTS | WEIGHTED)[count].compute
    rest = tuple(name for name in BOTH if name not in own)
    whole = batch_loss(view.given, choice, rest) if rest else view.given["mask"].new_zeros(())
    if not own:
        return whole * {"averaged": 1 / len(parts), "times parts": len(parts)}.get(count, 1) if parts else whole
    values = [batch_loss(part, choice, own) for part in parts]
    if count == "part, averaged" and view.combine == "mean":
        return whole * torch.nan  # which "part" is already
    if count == "weighted":
        shares = [part["all_tokens"].sum() / view.given["all_tokens"].sum() for part in parts]
        return torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum()
    return whole + combined(values, "mean" if count == "part, averaged" else view.combine)


def combined(outputs: Sequence[Tensor], combine: str) -> Tensor:
    """Join the outputs of parts into one."""
    stacked = torch.stack(list(outputs))
    return stacked.mean(0) if combine == "mean" else stacked.sum(0)


def _selected(view: View, selection: str) -> View:
    """The view with the mask of the tokens with the highest scores, a share of those that count."""
    given, mask = view.given, view.given["mask"].clone()
    cut = view.case.parts if selection == "part" and view.cut != "whole" else (range(len(mask)),)
    for rows in map(list, cut if selection != "none" else ()):
        number = max(1, round(given["share"] * float(mask[rows].sum())))
        lowest = given["scores"][rows].where(mask[rows] != 0, -torch.inf).flatten().topk(number).values[-1]
        mask[rows] = mask[rows] * (given["scores"][rows] >= lowest)
    return replace(view, given={**given, "mask": mask, "all_tokens": given["mask"]})


def _scalar_or_tokens(view: View, output: Tensor) -> Tensor:
    return output[view.given["mask"] != 0] if view.form == "tokens" else output


def _batch(rows: int, width: int, seed: int, spread: float) -> dict[str, Any]:
    """Rows of full length whose policies are all equal, of a policy whose log ratios would lie within the spread."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.rand(rows, width, generator=generator, dtype=torch.float64)

    logprobs = -0.2 - 2 * drawn()
    advantages = torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.3], dtype=torch.float64)[:rows, None]
    moved = spread * (2 * drawn() - 1)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs.clone(),
        "ref_logprobs": logprobs.clone(),
        "rollout_logprobs": logprobs.clone(),
        "advantages": advantages.expand(rows, width).clone(),
        "mask": torch.ones(rows, width, dtype=torch.float64),
        "_moved": moved,
        "_other": 0.8 * (2 * drawn() - 1),
    }


def _moved(given: dict[str, Any], share: float = 1.0) -> dict[str, Any]:
    """A batch of `_batch` after the policy has moved away from the policy that sampled."""
    old = given["logprobs"] - share * given["_moved"]
    return {**given, "old_logprobs": old, "rollout_logprobs": old.clone()}


def _uneven(given: dict[str, Any], lengths: Sequence[int], junk: float = 0.0) -> dict[str, Any]:
    """A batch with rows of these lengths; what stands behind their ends differs from 0 by `junk`."""
    places = torch.arange(given["mask"].shape[1])
    mask = (places < torch.tensor(lengths)[:, None]).double()
    names = [name for name in given if name.endswith("logprobs")]
    padded = {name: given[name].where(mask != 0, junk * (1 + 0.1 * number)) for number, name in enumerate(names)}
    return {**given, **padded, "mask": mask}


EMPTY = "each row must have a token that counts"
NAN = "a mask that multiplies lets NaN through, and torch.where does not"


def _scaled(given: dict[str, Any], by: float) -> dict[str, Any]:
    return {**given, "advantages": by * given["advantages"]}


HALVES = ((0, 1), (2, 3))


def loss_cases(spread: float) -> list[Case]:
    """Batches for a loss, from the one in which the fewest terms matter.

    Args:
        spread: A log ratio that a clip lets pass on both sides; some are up to four times as large.
    """
    plain = _batch(4, 6, 0, 4 * spread)
    lengths = (5, 2, 2, 6)
    everything = {**_moved(_batch(4, 6, 1, 4 * spread))}
    everything["ref_logprobs"] = everything["logprobs"] - everything["_other"]
    rollout = everything["old_logprobs"] - everything["_other"].flip(0)
    everything = {**everything, "rollout_logprobs": rollout}
    tool = _uneven(_moved(_batch(4, 6, 2, 4 * spread)), lengths, junk=-0.4)
    tool["advantages"][2] = 0.0
    tool["mask"] = tool["mask"] * torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6, [1] * 6, [1, 0, 1, 1, 0, 1]])
    wide = {
        name: torch.nn.functional.pad(x, (0, 3), value=-0.3 if name.endswith("logprobs") else 0.0)
        for name, x in _uneven(everything, lengths).items()
    }
    wide["advantages"] = wide["advantages"][:, :1].expand(4, 9).clone()
    emptied = _uneven(plain, (5, 2, 0, 6))
    sampler = {**_uneven(plain, lengths), "rollout_logprobs": plain["logprobs"] - plain["_other"]}
    broken = _uneven(_moved(plain), lengths)
    broken["old_logprobs"] = broken["old_logprobs"].where(broken["mask"] != 0, torch.nan)
    other_reference = {**plain, "ref_logprobs": plain["logprobs"] - plain["_other"]}
    return [
        Case("on-policy, rows of one length", "sign", plain, HALVES),
        Case("rows of different lengths", "denominator", _scaled(_uneven(plain, lengths), 1.7), HALVES),
        Case("ratios within the clip", "ratio", _moved(plain, 0.05), HALVES),
        Case("ratios beyond the clip", "clip", _moved(plain), HALVES),
        Case(
            "ratios of 4 and of a fourth", "dual clip", _moved(plain, 1.5 / float(plain["_moved"].abs().max())), HALVES
        ),
        Case("another reference", "KL estimator", other_reference, HALVES),
        Case("another sampler", "importance weights", sampler, HALVES),
        Case("tokens of a tool", "mask", tool, HALVES),
        Case("as many rows as tokens", "padding", _uneven(_moved(_batch(4, 4, 3, 4 * spread)), (2, 4, 1, 3)), HALVES),
        Case("all of these", "padding", _uneven(everything, lengths, junk=-0.4), HALVES),
        Case("the same, padded wider", "padding", wide, HALVES),
        Case("a row without a token", "denominator", emptied, edge=EMPTY),
        Case("NaN under the mask", "mask", broken, edge=NAN),
    ]


def _aggregation_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(4)
    made = [torch.randn(4, width, generator=generator, dtype=torch.float64) for width in (5, 5, 4, 5)]
    full = torch.ones(4, 5, dtype=torch.float64)
    lengths = torch.tensor([5, 1, 2, 4])[:, None]
    uneven = (torch.arange(5) < lengths).double()
    holes = uneven * torch.tensor([[1, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1] * 5])
    few = (torch.arange(5) < torch.tensor([5, 0, 2, 4])[:, None]).double()
    scores = torch.rand(4, 5, generator=generator, dtype=torch.float64) + torch.tensor([[1.0], [1.0], [0.0], [0.2]])
    given = [
        ("rows of one length", "sign", made[0], full, HALVES),
        ("rows of different lengths", "denominator", made[1], uneven, HALVES),
        ("as many rows as tokens", "padding", made[2], uneven[:, :4], HALVES),
        ("tokens of a tool", "mask", made[3], holes, HALVES),
        ("a row without a token", "denominator", made[3], few, ()),
    ]
    return [
        Case(
            name,
            term,
            {"loss": x, "mask": m, "scores": scores[:, : x.shape[1]], "rollout": torch.tensor([0, 0, 1, 2])},
            parts,
            edge="" if parts else EMPTY,
        )
        for name, term, x, m, parts in given
    ]


def loss_interface(spread: float) -> Interface:
    """The interface of losses of a batch."""
    return Interface(
        "loss",
        loss_cases(spread),
        LOSS_TERMS,
        _reference,
        _scalar_or_tokens,
        "all of these",
        properties.LOSS,
        needs={
            "KL estimator": "ref_logprobs",
            "sign of KL": "ref_logprobs",
            "denominator of KL": "ref_logprobs",
            "importance weights": "rollout_logprobs",
        },
        differentiates="logprobs",
    )


AGGREGATION = Interface(
    "aggregation",
    _aggregation_cases(),
    {
        "sign": SIGNS,
        "mask": MASKS,
        "denominator": DENOMINATORS | OF_ROLLOUTS,
        "denominator of micro-batches": AGGREGATION_COUNTS,
        "denominator of ranks": AGGREGATION_COUNTS,
        "selection": SELECTIONS,
    },
    _reference,
    _scalar_or_tokens,
    "tokens of a tool",
    properties.AGGREGATION,
    needs={"selection": "token_scores"},
    differentiates="loss",
)
