"""What is right for a loss, and for the mean of a loss per token: PPO's surrogate and its kin, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.conform import properties
from rlflow.conform.terms import Case, Choice, Given, Interface, Option, View
from rlflow.functional import gmpo_loss, kl_estimate, sapo_loss

MODES = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant")
K3 = ("k3", "k3-ratio", "k2", "k3+")
EVERY_ROW = "sequence-mean-token-mean, of all rows"


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1]`, the mean of the entries that count; 0 in rows without one."""
    return _sum(x, mask).sum(1, keepdim=True) / _nonzero(mask.sum(1, keepdim=True))


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return x.where(mask != 0, 0.0) * mask


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


# Log ratios from d = log pi - log old `[B, T]` and the mask.
RATIOS = {
    "token": Option("the ratio of each token", lambda d, m: d),
    "geometric": Option(
        "one ratio for each sequence, the geometric mean of its tokens'", lambda d, m: _row_mean(d, m), ("sequence",)
    ),
    "sequence": Option(
        "one ratio for each sequence, the product of its tokens'",
        lambda d, m: _sum(d, m).sum(1, keepdim=True),
        ("geometric",),
    ),
    "summed": Option(
        "the sum of the tokens' ratios in place of the ratio of the sequence",
        lambda d, m: _sum(d.exp(), m).sum(1, keepdim=True).clamp(min=1e-9).log(),
    ),
    "mean": Option(
        "the arithmetic mean of the tokens' ratios in place of the ratio of the sequence",
        lambda d, m: _row_mean(d.exp(), m).clamp(min=1e-9).log(),
    ),
    "padded": Option(
        "the ratio of a sequence by the padded width in place of its length",
        lambda d, m: _sum(d, m).sum(1, keepdim=True) / d.shape[1],
    ),
    "inverse": Option("the ratio is old over new", lambda d, m: -d),
    "itself": Option("the ratio is to the policy itself, so always 1", lambda d, m: d - d.detach()),
    "batch": Option("one ratio for the whole batch", lambda d, m: (_sum(d, m).sum() / _nonzero(m.sum())).expand(1, 1)),
    "detached": Option("the ratio has no gradient", lambda d, m: d.detach()),
}


def _clamped(r: Tensor, low: float, high: float) -> Tensor:
    return r.clamp(1 - low, 1 + high)


# Losses per token from the ratio r, its log, advantages, log pi, the mask and the two ends of the clip.
CLIPS = {
    "min": Option(
        "min(r A, clip(r) A)", lambda r, a, lp, m, low, high: -torch.minimum(r * a, _clamped(r, low, high) * a)
    ),
    "none": Option("no clip", lambda r, a, lp, m, low, high: -r * a),
    "clamped": Option("clip(r) A without the min with r A", lambda r, a, lp, m, low, high: -_clamped(r, low, high) * a),
    "max": Option(
        "max where the objective has min, so the clip is on the other side",
        lambda r, a, lp, m, low, high: -torch.maximum(r * a, _clamped(r, low, high) * a),
    ),
    "upper": Option(
        "the upper end of the clip alone",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, r.clamp(max=1 + high) * a),
    ),
    "lower": Option(
        "the lower end of the clip alone",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, r.clamp(min=1 - low) * a),
    ),
    "swapped": Option(
        "the lower and the upper range of the clip are swapped",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, _clamped(r, high, low) * a),
    ),
    "low twice": Option(
        "the lower range at both ends of the clip",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, _clamped(r, low, low) * a),
    ),
    "high twice": Option(
        "the upper range at both ends of the clip",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, _clamped(r, high, high) * a),
    ),
    "log": Option(
        "the log ratio is clipped to the range of the ratio",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, r.log().clamp(-low, high).exp() * a),
    ),
    "zero": Option(
        "the ratio is clipped around 0 in place of 1",
        lambda r, a, lp, m, low, high: -torch.minimum(r * a, r.clamp(-low, high) * a),
    ),
    "gain": Option(
        "the clip of tokens with a positive advantage alone",
        lambda r, a, lp, m, low, high: -torch.where(a > 0, torch.minimum(r * a, _clamped(r, low, high) * a), r * a),
    ),
    "loss": Option(
        "the clip of tokens with a negative advantage alone",
        lambda r, a, lp, m, low, high: -torch.where(a < 0, torch.minimum(r * a, _clamped(r, low, high) * a), r * a),
    ),
    "weight": Option(
        "a detached ratio, cut from above, as the weight of A log pi",
        lambda r, a, lp, m, low, high: -r.detach().clamp(max=1 + high) * a * lp,
        ("weight both",),
    ),
    "weight both": Option(
        "a detached ratio, cut at both ends, as the weight of A log pi",
        lambda r, a, lp, m, low, high: -_clamped(r, low, high).detach() * a * lp,
        ("weight",),
    ),
    "weight high": Option(
        "a detached ratio, cut at the upper range itself and not at 1 plus it, as the weight of A log pi",
        lambda r, a, lp, m, low, high: -r.detach().clamp(max=high) * a * lp,
        ("weight",),
    ),
    "weight uncut": Option(
        "a detached ratio, not cut, as the weight of A log pi", lambda r, a, lp, m, low, high: -r.detach() * a * lp
    ),
    "log pi": Option("A log pi without a ratio", lambda r, a, lp, m, low, high: -a * lp),
    "sapo": Option("SAPO's gate", lambda r, a, lp, m, low, high: sapo_loss(r.log(), torch.zeros_like(r), a)),
    "gmpo": Option(
        "GMPO's geometric mean",
        lambda r, a, lp, m, low, high: gmpo_loss(r.log(), torch.zeros_like(r), a, m, low, high)[:, None].expand_as(r),
    ),
}
DUALS = {
    "none": Option("no dual clip", lambda loss, a: loss),
    "3": Option(
        "dual clip at 3 (arXiv 1912.09729)",
        lambda loss, a: torch.where(a < 0, torch.minimum(loss, -3.0 * a), loss),
        ("none",),
    ),
}
# Divergences per token from log pi, log ref and log old.
KLS = {
    kind: Option(f"{kind} as the KL estimator", lambda lp, ref, old, kind=kind: kl_estimate(lp, ref, kind, old), other)
    for kind, other in {**dict.fromkeys(K3, K3), "k1": (), "abs": ()}.items()
}
KLS |= {
    "reversed": Option("k3 of the reference to the policy", lambda lp, ref, old: (lp - ref).exp() - 1 - (lp - ref)),
    "reversed k1": Option("log ref - log pi as the KL estimator", lambda lp, ref, old: ref - lp),
    "square": Option("the whole square of the log ratio, twice k2", lambda lp, ref, old: (lp - ref).square()),
    "exp": Option("k3 without its linear part", lambda lp, ref, old: (ref - lp).exp() - 1),
    "of old": Option("k3 to the old policy", lambda lp, ref, old: kl_estimate(lp, old, "k3")),
    "constant": Option("k3 without a gradient", lambda lp, ref, old: kl_estimate(lp.detach(), ref, "k3")),
    "none": Option("no KL", lambda lp, ref, old: torch.zeros_like(lp)),
}
SIGNS = {
    "minus": Option("the objective with a minus", lambda x: x),
    "plus": Option("the objective without the minus, so it is descended", lambda x: -x),
}
KL_SIGNS = {
    "plus": Option("KL is added", lambda x: x),
    "minus": Option("KL is subtracted from what is minimised, so drift is rewarded", lambda x: -x),
    "twice": Option("KL is added twice", lambda x: 2 * x),
}


def _shifted(mask: Tensor, by: int) -> Tensor:
    shifted = torch.zeros_like(mask)
    if by > 0:
        shifted[:, by:] = mask[:, :-by]
    else:
        shifted[:, :by] = mask[:, -by:]
    return shifted


# The mask by which a loss is summed and counted, from the mask given and the advantages `[B, T]`.
MASKS = {
    "tokens": Option("the mask of tokens that count", lambda m, a: m),
    "none": Option("no mask, so padding counts", lambda m, a: torch.ones_like(m)),
    "late": Option("the mask one token late", lambda m, a: _shifted(m, 1)),
    "early": Option("the mask one token early", lambda m, a: _shifted(m, -1)),
    "advantages": Option("advantages stand where the mask should", lambda m, a: a),
    "signal": Option("tokens whose advantage is 0 are left out", lambda m, a: m * (a != 0)),
    "but last": Option("the last token of each row is left out", lambda m, a: m * (m.flip(1).cumsum(1).flip(1) > 1)),
    "but first": Option("the first token of each row is left out", lambda m, a: m * (m.cumsum(1) > 1)),
    "end": Option("the token after the end counts", lambda m, a: torch.maximum(m, _shifted(m, 1))),
    "span": Option(
        "tokens between the first and the last that count, so a tool's too",
        lambda m, a: ((m.cumsum(1) > 0) & (m.flip(1).cumsum(1).flip(1) > 0)).to(m.dtype),
    ),
    "gains": Option("tokens with a negative advantage are left out", lambda m, a: m * (a > 0)),
}


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return x.sum() / _nonzero((mask != 0).any(1).sum().to(x.dtype))


def _of_rollouts(x: Tensor, mask: Tensor, given: Given) -> Tensor:
    """The sum over rollouts of the mean over tokens."""
    rollout = given["rollout"]
    same = (rollout.unique()[:, None] == rollout).to(x.dtype)
    means: Tensor = (same @ _sum(x, mask).sum(1)) / _nonzero(same @ mask.sum(1))
    return means.sum()


# One number from a loss per token, its mask, the mask given and the case.
DENOMINATORS = {
    "token-mean": Option("the mean over tokens", lambda x, m, own, given: _sum(x, m).sum() / _nonzero(m.sum()), MODES),
    "sequence-mean-token-mean": Option(
        "the mean over rows of the mean over tokens", lambda x, m, own, given: _mean(_row_mean(x, m), m), MODES
    ),
    "sequence-mean-token-sum": Option(
        "the mean over rows of the sum over tokens", lambda x, m, own, given: _mean(_sum(x, m).sum(1), m), MODES
    ),
    "constant": Option(
        "the sum over the longest length allowed and the rows",
        lambda x, m, own, given: _sum(x, m).sum() / (given["max_length"] * len(x)),
        MODES,
    ),
    "sequence-mean": Option("the mean over rows", lambda x, m, own, given: _mean(_row_mean(x, m), m)),
    EVERY_ROW: Option(
        "the mean over all rows, also those without a token, of the mean over tokens",
        lambda x, m, own, given: _row_mean(x, m).mean(),
        (*MODES, "sequence-mean"),
    ),
    "empty rows too": Option(
        "the mean over all rows, those without a token too, whose loss is that of a ratio of 1",
        lambda x, m, own, given: _row_mean(x, torch.where((m != 0).any(1, keepdim=True), m, 1.0)).mean(),
        ("sequence-mean",),
    ),
    "sequence-mean-token-sum, of all rows": Option(
        "the mean over all rows, also those without a token, of the sum over tokens",
        lambda x, m, own, given: _sum(x, m).sum() / len(x),
        MODES,
    ),
    "width": Option("the padded width counts: all positions", lambda x, m, own, given: _sum(x, m).sum() / x.numel()),
    "given mask": Option(
        "the sum is over other tokens than the count",
        lambda x, m, own, given: _sum(x, m).sum() / _nonzero(own.sum()),
    ),
    "sum": Option("nothing divides the sum", lambda x, m, own, given: _sum(x, m).sum()),
    "longest": Option(
        "the longest row of the batch times the rows",
        lambda x, m, own, given: _sum(x, m).sum() / _nonzero(m.sum(1).max() * len(x)),
    ),
    "length": Option(
        "the longest length allowed, without the rows", lambda x, m, own, given: _sum(x, m).sum() / given["max_length"]
    ),
    "rows": Option(
        "each row's sum over the mean length", lambda x, m, own, given: _sum(x, m).sum() / _nonzero(m.sum(1).mean())
    ),
    "columns": Option(
        "the mean over positions of the mean over rows",
        lambda x, m, own, given: (_sum(x, m).sum(0) / _nonzero(m.sum(0))).sum() / _nonzero((m.sum(0) != 0).sum()),
    ),
    "square root": Option(
        "each row's sum over the root of its length",
        lambda x, m, own, given: _mean(_sum(x, m).sum(1) / _nonzero(m.sum(1)).sqrt(), m),
    ),
    "one more": Option("the count of tokens plus one", lambda x, m, own, given: _sum(x, m).sum() / (m.sum() + 1)),
}
KL_DENOMINATORS = {
    "same": Option("KL is counted as the surrogate is", None),
    "padding": Option("the mean of KL is over all positions, so padding counts", None),
    **{
        name: Option(f"the mean of KL is another than the surrogate's: {option.text}", None)
        for name, option in DENOMINATORS.items()
        if name in (*MODES, EVERY_ROW, "width", "sum")
    },
}
ADVANTAGES = {
    "given": Option("advantages as they are given", lambda a, m: a),
    "whitened": Option("advantages are whitened over the batch", lambda a, m: _whitened(a, m), ("given",)),
    "centred": Option("the mean is taken off the advantages", lambda a, m: a - _sum(a, m).sum() / m.sum()),
    "signs": Option("the signs of the advantages alone", lambda a, m: a.sign()),
    "gains": Option("negative advantages count as 0", lambda a, m: a.clamp(min=0)),
}


def _whitened(a: Tensor, mask: Tensor) -> Tensor:
    mean = _sum(a, mask).sum() / mask.sum()
    return (a - mean) / (_sum((a - mean).square(), mask).sum() / (mask.sum() - 1)).sqrt()


COUNTS = {
    "whole": Option("the count of the whole batch", None),
    "part": Option("each part divides by its own count", None),
    "part, averaged": Option("each part divides by its own count, and the parts are averaged", None),
    "part, KL": Option("each part divides its KL by its own count", None),
    "part, surrogate": Option(
        "each part divides its surrogate by its own count, and its KL by that of the batch", None
    ),
    "averaged": Option("sums that were divided by the count of the whole batch are averaged over the parts", None),
    "times parts": Option("the value is that of the whole times the number of parts", None),
    "weighted": Option("each part's mean is weighted by its tokens before the selection", None),
}
OF_ROLLOUTS = {
    "rollouts": Option(
        "the mean over rollouts of the mean over tokens, whatever rows a rollout is cut into",
        lambda x, m, own, given: _of_rollouts(x, m, given) / len(given["rollout"].unique()),
        MODES,
    ),
    "rollouts over rows": Option(
        "the means over the tokens of rollouts, summed and divided by the rows",
        lambda x, m, own, given: _of_rollouts(x, m, given) / len(x),
        MODES,
    ),
}
AGGREGATION_COUNTS = {name: COUNTS[name] for name in COUNTS if name not in ("part, KL", "part, surrogate")}
SELECTIONS = {
    "none": Option("no selection", lambda s, m, share: m),
    "whole": Option("tokens are selected in the whole batch", None),
    "part": Option("tokens are selected in each part by itself", None),
}
IMPORTANCES = {
    "truncate": Option("truncated at 2", lambda w: w.clamp(max=2.0), ("none",)),
    "none": Option("no correction for the sampler", lambda w: torch.ones_like(w), ("truncate",)),
    "uncut": Option("the sampler's correction is not truncated", lambda w: w, ("truncate",)),
    "inverse": Option("the sampler's correction is upside down", lambda w: (1 / w).clamp(max=2.0)),
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
    "denominator of micro-batches": {name: option for name, option in COUNTS.items() if name != "weighted"},
    "denominator of ranks": {name: option for name, option in COUNTS.items() if name != "weighted"},
}


def batch_loss(given: Given, choice: Choice, *, only: str = "") -> Tensor:
    """The loss of a batch, 0-dim; with `only` its surrogate or its KL alone."""
    surrogate, kl, mask = loss_per_token(given, choice)

    def divided(loss: Tensor, by: str) -> Tensor:
        if by == "padding":
            return loss.mean()
        return DENOMINATORS[by](loss, mask, given["mask"], given)

    of_kl = choice["denominator of KL"]
    parts = {"surrogate": surrogate, "kl": kl}
    counted = {"surrogate": choice["denominator"], "kl": choice["denominator"] if of_kl == "same" else of_kl}
    return sum((divided(parts[name], counted[name]) for name in parts if only in ("", name)), surrogate.new_zeros(()))


def loss_per_token(given: Given, choice: Choice) -> tuple[Tensor, Tensor, Tensor]:
    """Surrogate, KL and the mask by which they are summed, `[B, T]` each."""
    lp, old, own = given["logprobs"], given["old_logprobs"], given["mask"]
    a = ADVANTAGES[choice["normalization"]](given["advantages"], own)
    low, high = given["clip_low"], given["clip_high"]
    if choice["clip range"] != "given":
        low, high = (float(x) for x in choice["clip range"].split(", "))
    mask = MASKS[choice["mask"]](own, a)
    log_r = RATIOS[choice["ratio"]](lp - old, own).expand_as(lp)
    surrogate = CLIPS[choice["clip"]](log_r.clamp(-20, 20).exp(), a, lp, own, low, high)
    surrogate = SIGNS[choice["sign"]](DUALS[choice["dual clip"]](surrogate, a))
    weights = IMPORTANCES[choice["importance weights"]]((old - given["rollout_logprobs"]).clamp(-20, 20).exp())
    kl = given["kl_coef"] * KLS[choice["KL estimator"]](lp, given["ref_logprobs"], old)
    return surrogate * weights, KL_SIGNS[choice["sign of KL"]](kl), mask


def _loss_reference(view: View, choice: Choice) -> Tensor:
    if view.form == "tokens":
        surrogate, kl, _ = loss_per_token(view.given, choice)
        return surrogate + kl
    count = _count(view, choice)
    for here, there in (("kl", "surrogate"), ("surrogate", "kl")):
        if count == {"kl": "part, KL", "surrogate": "part, surrogate"}[here]:
            own = combined([batch_loss(part, choice, only=here) for part in view.parts()], view.combine)
            return own + batch_loss(view.given, choice, only=there)
    if count.startswith("part"):
        values = [batch_loss(part, choice) for part in view.parts()]
        return _of_own_counts(values, count, view.combine)
    return _times(batch_loss(view.given, choice), count, len(view.case.parts))


def _count(view: View, choice: Choice) -> str:
    """The option of what divides the parts of a view."""
    return "whole" if view.cut == "whole" else choice[f"denominator of {view.cut}"]


def _of_own_counts(values: Sequence[Tensor], count: str, combine: str) -> Tensor:
    if count == "part, averaged" and combine == "mean":
        return values[0] * torch.nan  # which "part" is already
    return combined(values, "mean" if count == "part, averaged" else combine)


def _times(whole: Tensor, count: str, parts: int) -> Tensor:
    return {"averaged": whole / max(1, parts), "times parts": whole * parts}.get(count, whole)


def combined(outputs: Sequence[Tensor], combine: str) -> Tensor:
    """One output from those of parts."""
    stacked = torch.stack(list(outputs))
    return stacked.mean(0) if combine == "mean" else stacked.sum(0)


def _aggregation_reference(view: View, choice: Choice) -> Tensor:
    given, count = view.given, _count(view, choice)
    parts = view.parts() if view.cut != "whole" else [given]
    masks = [_selected(part, choice) for part in (parts if choice["selection"] == "part" else [given])]
    if choice["selection"] != "part" and len(parts) > 1:
        masks = [masks[0][list(rows)] for rows in view.case.parts]
    summed = [MASKS[choice["mask"]](mask, part["loss"]) for part, mask in zip(parts, masks, strict=True)]

    denominators = DENOMINATORS | OF_ROLLOUTS

    def divide(of: Given, x: Tensor, summed: Tensor, own: Tensor) -> Tensor:
        return SIGNS[choice["sign"]](denominators[choice["denominator"]](x, summed, own, of))

    values = [divide(part, part["loss"], m, own) for part, m, own in zip(parts, summed, masks, strict=True)]
    if count == "weighted":
        shares = [part["mask"].sum() / given["mask"].sum() for part in parts]
        return combined([share * value for share, value in zip(shares, values, strict=True)], "sum")
    if count.startswith("part"):
        return _of_own_counts(values, count, view.combine)
    joined = {**given, "rollout": torch.cat([part["rollout"] for part in parts])}
    whole = divide(joined, torch.cat([part["loss"] for part in parts]), torch.cat(summed), torch.cat(masks))
    return _times(whole, count, len(parts))


def _selected(given: Given, choice: Choice) -> Tensor:
    """The mask of the tokens with the highest scores, a share of those that count."""
    mask: Tensor = given["mask"]
    if choice["selection"] == "none":
        return mask
    number = max(1, round(given["share"] * float(mask.sum())))
    lowest = given["scores"].where(mask != 0, -torch.inf).flatten().topk(number).values[-1]
    highest: Tensor = given["scores"] >= lowest
    return mask * highest


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
    """The same, after the policy has moved away from the one that sampled."""
    old = given["logprobs"] - share * given["_moved"]
    return {**given, "old_logprobs": old, "rollout_logprobs": old.clone()}


def _uneven(given: dict[str, Any], lengths: Sequence[int], junk: float = 0.0) -> dict[str, Any]:
    """The same with rows of these lengths; what stands behind their ends differs from 0 by `junk`."""
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
    """Losses of a batch."""
    return Interface(
        "loss",
        loss_cases(spread),
        LOSS_TERMS,
        _loss_reference,
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
    _aggregation_reference,
    _scalar_or_tokens,
    "tokens of a tool",
    properties.AGGREGATION,
    needs={"selection": "token_scores"},
    differentiates="loss",
)
