"""Which terms of a function differ from an algorithm's, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor

from rlflow.conform.advantages import GROUP, TOKENS, WHITENING
from rlflow.conform.calling import NAMES, NEUTRAL, Function, first_tensor, said_by
from rlflow.conform.logprobs import LOGPROBS
from rlflow.conform.losses import AGGREGATION, loss_interface
from rlflow.conform.properties import broken
from rlflow.conform.terms import Change, Choice, Given, Interface, Terms, View, changes_from, chosen, explanations
from rlflow.errors import UserError

Kind = Literal["advantages", "loss", "aggregation", "normalization", "logprobs"]
Verdict = Literal["conforms", "convention", "differs"]


@dataclass(frozen=True)
class Algorithm:
    """What an algorithm's own options are.

    Attributes:
        source: Its paper.
        baseline: Baseline of a group; or of tokens, `gae` or `return`.
        normalization: What advantages are divided by.
        ratio: Level of the ratio.
        clip: The surrogate.
        denominator: The mean over tokens and rows; for all but losses of whole sequences a convention.
        low: The range of the clip downwards.
        high: The range of the clip upwards.
    """

    source: str
    baseline: str = "mean"
    normalization: str = "std"
    ratio: str = "token"
    clip: str = "min"
    denominator: str = "token-mean"
    low: float = 0.2
    high: float = 0.2


ALGORITHMS = {
    "grpo": Algorithm("arXiv 2402.03300"),
    "dr_grpo": Algorithm("arXiv 2503.20783", normalization="none", denominator="constant"),
    "dapo": Algorithm("arXiv 2503.14476", high=0.28),
    "rloo": Algorithm("arXiv 2402.14740", baseline="others", normalization="none"),
    "opo": Algorithm("arXiv 2505.23585", baseline="length", normalization="none"),
    "maxrl": Algorithm("arXiv 2602.02710", normalization="mean"),
    "gspo": Algorithm("arXiv 2507.18071", ratio="geometric", denominator="sequence-mean", low=3e-4, high=4e-4),
    "gmpo": Algorithm("arXiv 2507.20673", clip="gmpo", denominator="sequence-mean", low=0.4, high=0.4),
    "cispo": Algorithm("arXiv 2506.13585", clip="weight"),
    "sapo": Algorithm("arXiv 2511.20347", clip="sapo"),
    "reinforce": Algorithm("Williams 1992", baseline="others", normalization="none", clip="log pi"),
    "reinforce_plus_plus": Algorithm("arXiv 2501.03262", baseline="return", normalization="population"),
    "ppo": Algorithm("arXiv 1707.06347", baseline="gae", normalization="none"),
}


@dataclass(frozen=True)
class Observed:
    """What a function returned for a view, or the gradient of that.

    Attributes:
        view: The view.
        entries: The entries that are compared, in float64.
        gradient: Whether they are of the gradient.
    """

    view: View
    entries: Tensor
    gradient: bool


@dataclass(frozen=True)
class Diagnosis:
    """What was found of a function.

    Attributes:
        verdict: The worst that was found.
        changes: The terms that it computes in another way; other sets that fit as well follow in `others`.
        others: Sets of changes that the cases cannot tell from `changes`.
        unexplained: Cases that no change explains: the case, its term, and what was found and expected.
        lost: Properties of right functions that it does not have, by their terms, if something is unexplained.
        notes: What is no difference and worth knowing.
        form: How it was called and what it returned.
    """

    verdict: Verdict
    changes: tuple[Change, ...]
    others: tuple[tuple[Change, ...], ...]
    unexplained: tuple[tuple[str, str, str], ...]
    lost: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    form: str

    @property
    def terms(self) -> set[str]:
        """The terms that differ, conventions apart; if there is something unexplained, where it was first seen."""
        changed = {each.term for each in self.changes if not each.is_convention}
        return changed | {term for term, _ in self.lost} | {term for _, term, _ in self.unexplained[:1]}


def algorithm_named(name: str) -> tuple[str, Algorithm]:
    """The algorithm of a name, however it is written: `GRPO`, `DrGRPO`, `dr_grpo`.

    Raises:
        UserError: It is not known here.
    """
    key = name.replace("_", "").replace("+", "plus").replace("-", "").replace(" ", "").replace(".", "").lower()
    known = {each.replace("_", ""): each for each in ALGORITHMS}
    if key not in known:
        near = get_close_matches(key, known, 1, 0.0)[0]
        raise UserError(
            f"`--algorithm` is {name!r:.60}; conform knows {', '.join(ALGORITHMS)}. Did you mean {known[near]}?"
        )
    return known[key], ALGORITHMS[known[key]]


def conform(
    kind: Kind,
    call: Callable[..., Any],
    algorithm: str = "grpo",
    *,
    name: str = "the function",
    micro: str | None = None,
    ranks: str | None = None,
    settings: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Diagnosis:
    """Call a function on constructed cases, and compare what it returns with an algorithm's own.

    Args:
        kind: What the function computes.
        call: The function.
        algorithm: Name of the algorithm.
        name: What the function is called in messages.
        micro: How its values of micro-batches become one, `sum` or `mean`; None where the caller does not say.
        ranks: How its values of ranks become one, `sum` or `mean`.
        settings: Numbers, by the name of a setting or of a parameter.
        names: What parameters stand for whose names do not say it.
        dtype: Dtype of the cases.

    Raises:
        UserError: The function cannot be called, or returns what cannot be compared.
    """
    _, paper = algorithm_named(algorithm)
    interface, own = _interface(kind, paper)
    known = {each for case in interface.cases for each in case.given if not each.startswith("_")} & NAMES.keys()
    known |= {"total_tokens", "total_rows", "world_size", "parts", "reduce", "config", *_NUMBERS[kind]}
    known |= {"index"} if "group" in known else {"model"} if kind == "logprobs" else set()
    known |= {"token_scores"} if kind == "aggregation" else set()
    function = Function.of(call, name, known, settings or {}, names or {}, (paper.low, paper.high))
    own = _given_choice(own, function)
    watched: list[_Watched] = []
    failures: list[UserError] = []
    for is_bool in (False, True):  # of the mask, for a function that takes entries by it
        for given_as, form in _forms(kind, function):
            called = replace(function, advantages=given_as, mask_is_bool=is_bool)
            try:
                watched.append(_Watched(interface, own, called, form, micro, ranks, dtype))
            except UserError as error:
                failures.append(error)
        if watched:
            break
    if not watched:
        raise failures[0]
    if len(watched) > 1:  # the right form first
        watched = sorted(watched, key=lambda each: (len(each.raised), -each.likeness))
    for each in watched:
        sets = each.explained(deep=False)
        if sets:
            return each.finding(sets)
    return watched[0].finding(watched[0].explained(deep=True))


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "advantages": ("gamma", "lam", "eps"),
    "loss": ("clip_low", "clip_high", "clip_range", "kl_coef", "max_length"),
    "aggregation": ("share", "max_length"),
    "normalization": (),
    "logprobs": ("temperature",),
}


def _interface(kind: Kind, algorithm: Algorithm) -> tuple[Interface, dict[str, str]]:
    if kind == "loss":
        own = {"ratio": algorithm.ratio, "clip": algorithm.clip, "denominator": algorithm.denominator}
        first = loss_interface(0.75 * algorithm.low)
    elif kind == "advantages" and algorithm.baseline in ("gae", "return"):
        own = {"normalization": algorithm.normalization}
        own["baseline"] = "subtracted" if algorithm.baseline == "gae" else "ignored"
        first = TOKENS
    elif kind == "advantages":
        own = {"baseline": algorithm.baseline, "normalization": algorithm.normalization}
        first = GROUP
    else:
        own = {}
        first = {"aggregation": AGGREGATION, "normalization": WHITENING, "logprobs": LOGPROBS}[kind]
        if kind == "aggregation":
            own = {"denominator": algorithm.denominator}
    return first, {term: next(iter(options)) for term, options in first.terms.items()} | own


def _given_choice(own: dict[str, str], function: Function) -> dict[str, str]:
    """The algorithm's own options, of what the function takes."""
    if "importance weights" in own and not function.has("rollout_logprobs"):
        own["importance weights"] = "none"
    if "KL estimator" in own and not function.has("ref_logprobs"):
        own["KL estimator"] = "none"
    if "selection" in own and function.has("token_scores"):
        own["selection"] = "whole"
    if "baseline of rejected rows" in own and function.has("token_rewards"):
        own["baseline of rejected rows"] = "counted"  # there the mask says how long a row is, too
    return own


def _forms(kind: Kind, function: Function) -> list[tuple[str, str]]:
    """How advantages are given, and how the output is read, where that is not known before."""
    if kind == "logprobs":
        first = "model" if function.has("model") else "aligned" if function.has("targets") else "shifted"
        return [("tokens", first)] if first == "aligned" else [("tokens", first), ("tokens", f"{first} before")]
    return [("tokens", ""), ("rows", "")] if function.has("advantages") else [("tokens", "")]


class _Watched:
    """What a function returned in all cases, and what explains it.

    Attributes:
        observed: What the cases showed.
        raised: Cases in which it raised: the case, its term, and the error.
        notes: What is worth knowing.
    """

    def __init__(
        self,
        interface: Interface,
        own: Choice,
        function: Function,
        form: str,
        micro: str | None,
        ranks: str | None,
        dtype: torch.dtype,
    ) -> None:
        self._interface, self._own, self._function = interface, own, function
        self._joined = micro is not None or ranks is not None
        self.observed: list[Observed] = []
        self.raised: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        for view in _views(interface, function, form, micro, ranks, dtype):
            try:
                self.observed += _observed(interface, function, view, self.notes, is_first=not self.observed)
            except UserError as error:
                if not self.observed:
                    raise
                self.raised.append((str(view), view.case.term, str(error).removeprefix(function.name).strip()))
        self._terms = _terms(interface, function, {each.view.cut for each in self.observed})
        self._expected = _Expected(interface, self.observed)

    @property
    def likeness(self) -> int:
        """How many of the first observations one change at most explains."""
        first = self.observed[:4]
        choices = [self._own, *(chosen(self._own, [each]) for each in changes_from(self._own, self._terms))]
        return max(sum(self._expected.is_near(each, choice) for each in first) for choice in choices)

    def explained(self, deep: bool) -> list[tuple[Change, ...]]:
        """The sets of changes that explain it, by `explanations`."""
        return explanations(self._own, self._terms, self._expected.matched, len(self.observed), deep)

    def finding(self, sets: list[tuple[Change, ...]]) -> Diagnosis:
        """What was found, with the sets of changes that explain it, if there are any."""
        own, observed, function = self._own, self.observed, self._function
        changes, unexplained = (sets[0], ()) if sets else _nearest(own, self._terms, observed, self._expected)
        lost: tuple[tuple[str, str], ...] = ()
        if not sets:
            right = chosen(own, [each for each in changes if each.is_convention])
            lost = tuple(_lost(self._interface, function, right, observed))
        unexplained = (*unexplained, *self.raised)
        wrong = unexplained or any(not each.is_convention for each in changes)
        verdict: Verdict = "differs" if wrong else "convention" if changes else "conforms"
        given = "given advantages [B], " if function.has("advantages") and function.advantages == "rows" else ""
        told = f"{given}returns {observed[0].view.form or 'entries'}"
        notes = [*self.notes, *([] if unexplained else self._more_notes())]
        return Diagnosis(verdict, changes, tuple(sets[1:]), unexplained, lost, tuple(dict.fromkeys(notes)), told)

    def _more_notes(self) -> list[str]:
        function, interface = self._function, self._interface
        notes = []
        if function.has("ref_logprobs") and not function.has("kl_coef") and "kl_coef" not in function.chosen:
            notes.append(
                f"it takes no `kl_coef`, and {function.settings['kl_coef']} was expected: set --settings.kl_coef"
            )
        if not self._joined and interface.name in ("loss", "aggregation"):
            notes += _parts_note(function, self.observed)
        return notes


def _terms(interface: Interface, function: Function, cuts: set[str]) -> Terms:
    """The terms that can be examined through what the function takes."""
    config = function.has("config")
    left_out = {term for term, needed in interface.needs.items() if not function.has(needed)}
    if interface.name == "loss" and (function.has("clip_low", "clip_high", "clip_range") or config):
        left_out.add("clip range")
    left_out |= {f"denominator of {cut}" for cut in ("micro-batches", "ranks") if cut not in cuts}
    every = {term: options for term, options in interface.terms.items() if term not in left_out}
    if function.has("ref_logprobs"):
        return every
    return {
        term: {name: each for name, each in options.items() if name not in ("part, KL", "part, surrogate")}
        for term, options in every.items()
    }


def _views(
    interface: Interface, function: Function, form: str, micro: str | None, ranks: str | None, dtype: torch.dtype
) -> Iterator[View]:
    only_even = interface is GROUP and not function.has("group", "index")
    for case in interface.cases:
        if (case.needs and not function.has(case.needs)) or (only_even and not case.is_even):
            continue
        settings = {name: x for name, x in function.settings.items() if name not in case.given}
        given = {**settings, **{name: _cast(x, dtype) for name, x in case.given.items() if not name.startswith("_")}}
        given |= {name: function.settings[name] for name in NEUTRAL if name in given and not function.has(name)}
        yield View(case, "whole", "", form, given)
        if not case.parts:
            continue
        if interface is GROUP or interface is WHITENING:
            if interface is GROUP or function.has("reduce"):
                yield View(case, "ranks", "rows", form, given)
            continue
        if interface.name not in ("loss", "aggregation"):
            continue
        if micro or function.has("parts"):
            yield View(case, "micro-batches", micro or "sum", form, given)
        if ranks or function.has("reduce"):
            yield View(case, "ranks", ranks or "sum", form, given)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float64 else x


def _observed(interface: Interface, function: Function, view: View, notes: list[str], is_first: bool) -> list[Observed]:
    """What a view shows: the output, and its gradient if the function is one to descend."""
    by = interface.differentiates
    name = function.name

    def called() -> tuple[Tensor, View, dict[str, Any]]:
        given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in view.given.items()}
        if by is not None:
            given[by].requires_grad_(True)
        fresh = replace(view, given=given)
        with said_by(name, view):
            return first_tensor(function.output(fresh), name), fresh, given

    try:
        output, fresh, given = called()
        if not output.isfinite().all() and (view.case.edge or is_first):
            raise UserError(f"{name} returned {_first_broken(output)} on '{view}'; finite numbers are expected")
    except UserError as error:
        if not view.case.edge:
            raise
        what = str(error).removeprefix(name).replace(f" on '{view}'", "").replace("; finite numbers are expected", "")
        notes.append(f"{view}:{what} ({view.case.edge})")
        return []
    if is_first:
        _check_calls(name, view, called, output, given)
    form = view.form or _form_of(output, view, name, interface)
    shown = replace(fresh, form=form)
    _check_shape(output, shown, name)
    entries = interface.compared(shown, output)
    seen = [Observed(replace(view, form=form), entries.detach().double().flatten(), gradient=False)]
    if by is None:
        return seen
    if not entries.requires_grad:
        raise UserError(
            f"{name} returned a value without a gradient to `{by}`; a loss is expected that can be descended"
        )
    (gradient,) = torch.autograd.grad(entries.sum(), given[by], allow_unused=True)
    gradient = torch.zeros_like(given[by]) if gradient is None else gradient
    if view.case.edge and not gradient.isfinite().all():
        notes.append(f"{view}: its gradient has {_first_broken(gradient)} ({view.case.edge})")
        return seen
    return [*seen, Observed(replace(view, form=form), gradient.double().flatten(), gradient=True)]


def _first_broken(output: Tensor) -> str:
    return "NaN" if output.isnan().any() else "infinity"


def _form_of(output: Tensor, view: View, name: str, interface: Interface) -> str:
    rows = len(next(x for x in view.given.values() if isinstance(x, Tensor) and x.dim()))
    if interface.name in ("loss", "aggregation"):
        if output.numel() == 1:
            return "scalar"
        return "tokens"
    return "rows" if interface is GROUP and list(output.shape) == [rows] else "tokens" if interface is GROUP else ""


def _check_shape(output: Tensor, view: View, name: str) -> None:
    mask = view.given["mask"]
    shapes = {"scalar": [[], [1]], "rows": [[len(mask)]]}.get(view.form, [list(mask.shape)])
    if view.form.startswith(("model", "shifted")):
        shapes = [[len(mask), mask.shape[1] - 1], list(mask.shape)]
    if list(output.shape) not in shapes:
        wanted = " or ".join(str(each) for each in shapes)
        if view.form == "tokens":
            wanted = f"one number or {wanted}" if view.cut == "whole" else wanted
        raise UserError(f"{name} returned the shape {list(output.shape)} on '{view}'; {wanted} is expected")


def _check_calls(
    name: str,
    view: View,
    called: Callable[[], tuple[Tensor, View, dict[str, Any]]],
    output: Tensor,
    given: dict[str, Any],
) -> None:
    """Refuse a function that changes what it is given, or that returns something else when it is called again."""
    for key, x in view.given.items():
        if isinstance(x, Tensor) and not torch.equal(given[key].detach(), x):
            raise UserError(
                f"{name} changes its argument {key} `{list(x.shape)}`; inputs that stay as they are, are expected"
            )
    state = torch.get_rng_state()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again, _, _ = called()
    drew = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(state)
    if drew or not torch.equal(again, output):
        raise UserError(f"{name} draws random numbers: two calls with the same arguments are expected to give the same")


class _Expected:
    """What a right function with some options shows, computed once for each."""

    def __init__(self, interface: Interface, observed: Sequence[Observed]) -> None:
        self._interface = interface
        self._telling = sorted(observed, key=lambda each: each.gradient)  # values first: they take less time
        self._seen: dict[Any, Tensor] = {}
        self._views = {id(each): _in_float64(each.view) for each in observed}

    def entries(self, observed: Observed, choice: Choice) -> Tensor:
        """In the place of `observed.entries`."""
        key = (id(observed), *choice.values())
        if key not in self._seen:
            self._seen[key] = self._computed(observed, choice)
        return self._seen[key]

    def matched(self, choice: Choice, all_or_none: bool) -> int:
        """How many observations these options give; with `all_or_none` 0 if it is not all."""
        if not all_or_none:
            return sum(self.is_near(each, choice) for each in self._telling)
        for place, each in enumerate(self._telling):
            if not self.is_near(each, choice):
                if not each.gradient:
                    self._telling.insert(0, self._telling.pop(place))  # it may tell the next options apart as well
                return 0
        return len(self._telling)

    def is_near(self, observed: Observed, choice: Choice) -> bool:
        """Whether the function with these options shows what was observed."""
        entries, case = self.entries(observed, choice), observed.view.case
        if entries.shape != observed.entries.shape:
            return False
        if not entries.numel():
            return True
        largest = max(1.0 if case.tolerance > 1e-3 else 1e-2, float(entries.abs().max().nan_to_num()))
        return bool(((entries - observed.entries).abs() <= case.tolerance * largest).all())

    def _computed(self, observed: Observed, choice: Choice) -> Tensor:
        view, by = self._views[id(observed)], self._interface.differentiates
        if by is None or not observed.gradient:
            with torch.no_grad():
                return self._interface.compared(view, self._interface.reference(view, choice)).flatten()
        x = view.given[by].clone().requires_grad_(True)
        view = replace(view, given={**view.given, by: x})
        entries = self._interface.compared(view, self._interface.reference(view, choice))
        if not entries.requires_grad:
            return torch.zeros_like(x).flatten()
        (gradient,) = torch.autograd.grad(entries.sum(), x, allow_unused=True)
        return (torch.zeros_like(x) if gradient is None else gradient).flatten()


def _in_float64(view: View) -> View:
    given = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in view.given.items()}
    return replace(view, given=given)


def _lost(
    interface: Interface, function: Function, own: Choice, observed: Sequence[Observed]
) -> Iterator[tuple[str, str]]:
    """The properties that the function does not have, with their terms."""
    views = [each.view for each in observed if each.view.case.name == interface.typical and each.view.cut == "whole"]
    if not views:
        return
    view = views[0]

    def found(given: Given) -> Tensor:
        fresh = replace(view, given=given)
        with said_by(function.name, fresh):
            return interface.compared(fresh, first_tensor(function.output(fresh), function.name)).detach().double()

    def right(given: Given) -> Tensor:
        fresh = replace(view, given=given)
        return interface.compared(fresh, interface.reference(fresh, own)).double()

    for each in broken(interface.properties, view.given, found, right):
        yield each.term, each.text


def _scales(observed: Sequence[Observed], expected: _Expected, choice: Choice) -> list[float]:
    """How many times what is expected each case is; empty where a case is no multiple."""
    scales = []
    for each in observed:
        right = expected.entries(each, choice)
        if right.shape != each.entries.shape:
            return []
        scale = float((each.entries * right).sum() / right.square().sum().clamp(min=1e-12))
        if each.view.case.tolerance < 1e-3 and right.abs().max() > 1e-6:
            if abs(scale) < 1e-6 or not torch.allclose(each.entries, scale * right, rtol=1e-4, atol=1e-6):
                return []
            scales.append(scale)
    return scales


def _scaled(own: Choice, terms: Terms, observed: Sequence[Observed], expected: _Expected) -> tuple[Change, ...]:
    """That everything is a multiple of what it should be, if it is."""
    for conventions in ((), *((each,) for each in changes_from(own, terms) if each.is_convention)):
        scales = _scales(observed, expected, chosen(own, conventions))
        if scales:
            low, high = min(scales), max(scales)
            same = high - low <= 1e-4 * abs(high)
            text = f"everything is {high:.6g}" if same else f"cases are {low:.6g} to {high:.6g}"
            term = "denominator" if "denominator" in terms else "normalization"
            return (Change(term, "", f"{text} times what it should be", False), *conventions)
    return ()


def _nearest(
    own: Choice, terms: Terms, observed: Sequence[Observed], expected: _Expected
) -> tuple[tuple[Change, ...], tuple[tuple[str, str, str], ...]]:
    """The changes that explain most of the cases, and the cases that they do not explain."""
    scaled = _scaled(own, terms, observed, expected)
    if scaled:
        return scaled, ()
    best: tuple[Change, ...] = ()
    choice = dict(own)
    most = sum(expected.is_near(each, choice) for each in observed)
    for _ in range(3):  # one change after the other, as long as each explains more
        counts = [
            (sum(expected.is_near(each, {**choice, change.term: change.option}) for each in observed), change)
            for change in changes_from(own, terms)
            if change.term not in {each.term for each in best}
        ]
        count, change = max(counts, key=lambda each: (each[0], each[1].is_convention))
        if count <= most:
            break
        most, best, choice = count, (*best, change), {**choice, change.term: change.option}
    missed = [each for each in observed if not expected.is_near(each, choice)]
    told = {each.view.case.name: _told(each, expected.entries(each, choice)) for each in reversed(missed)}
    cases = [each.view.case for each in missed]
    return best, tuple((case.name, case.term, told[case.name]) for case in dict.fromkeys(cases))


def _told(observed: Observed, expected: Tensor) -> str:
    what = "gradient" if observed.gradient else "value"
    if expected.shape != observed.entries.shape:
        return f"{list(observed.entries.shape)} entries, {list(expected.shape)} expected"
    at = int((observed.entries - expected).abs().nan_to_num(nan=torch.inf).argmax())
    where = f" of entry {at}" if expected.numel() > 1 else ""
    cut = "" if observed.view.cut == "whole" else f", in {observed.view.cut}"
    return f"{what}{where} {observed.entries[at]:.6g}, expected {expected[at]:.6g}{cut}"


def _parts_note(function: Function, observed: Sequence[Observed]) -> list[str]:
    """How the values of two micro-batches become the value of the whole, where the user did not say."""
    if function.has("parts", "reduce") or observed[0].view.form != "scalar":
        return []
    matches = {"sum": True, "mean": True}
    for each in observed:
        if each.gradient or not each.view.case.parts or each.view.cut != "whole":
            continue
        for combine in matches:
            view = replace(each.view, cut="micro-batches", combine=combine)
            with said_by(function.name, view):
                value = first_tensor(function.output(view), function.name).detach().double().flatten()
            matches[combine] &= torch.allclose(value, each.entries, rtol=1e-4, atol=1e-6)
    fitting = [combine for combine, fits in matches.items() if fits]
    if fitting:
        return [f"the {fitting[0]} of its values on two micro-batches of as many rows is its value on the whole"]
    return [
        "neither the sum nor the mean of its values on two micro-batches is its value on the whole: each part divides"
        " by its own count. Say how a trainer joins them by --micro and --ranks, or take `total_tokens`"
    ]
