"""Finds which terms of a function differ from an algorithm's, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor

from rlflow.conform.advantages import GROUP, TOKENS, WHITENING
from rlflow.conform.calling import CORRECT_IT, NAMES, NEUTRAL, Function, errors_naming, first_tensor
from rlflow.conform.logprobs import LOGPROBS
from rlflow.conform.losses import AGGREGATION, loss_interface
from rlflow.conform.properties import broken, of_groups, of_weights
from rlflow.conform.terms import Change, Choice, Given, Interface, Terms, View, changes_from, chosen, explanations
from rlflow.errors import UserError

Kind = Literal["advantages", "loss", "aggregation", "normalization", "logprobs"]
Verdict = Literal["conforms", "convention", "differs"]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm's own choice of options.

    Attributes:
        source: Paper of the algorithm.
        baseline: Baseline of a group; or of tokens, `gae` or `return`.
        normalization: Divisor of advantages.
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
    """The output of a function for a view, or the gradient of that output.

    Attributes:
        view: The view.
        entries: The entries that are compared, in float64.
        gradient: Whether the entries are of the gradient.
    """

    view: View
    entries: Tensor
    gradient: bool


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a function.

    Attributes:
        verdict: The worst that was found.
        changes: The terms that it computes in another way; other sets that fit as well follow in `others`.
        others: Sets of changes that the cases cannot tell from `changes`.
        unexplained: Cases that no change explains: the case, its term, and what was found and expected.
        lost: Properties of right functions that it does not have, by their terms, if something is unexplained.
        notes: Remarks that are not differences.
        form: Way in which it was called, and form of its result.
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
        """The terms that differ, without conventions; if nothing names one, the term of the first case that differs."""
        changed = {each.term for each in self.changes if not each.is_convention}
        changed |= {term for term, _ in self.lost}
        return changed or {term for _, term, _ in self.unexplained[:1]}


def algorithm_named(name: str) -> tuple[str, Algorithm]:
    """The algorithm of this name, in any spelling: `GRPO`, `DrGRPO`, `dr_grpo`.

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
        kind: Quantity that the function computes.
        call: The function.
        algorithm: Name of the algorithm.
        name: Name of the function in messages.
        micro: Way in which its values of micro-batches become one, `sum` or `mean`; None if the caller does not say.
        ranks: Way in which its values of ranks become one, `sum` or `mean`.
        settings: Numbers, by the name of a setting or of a parameter.
        names: Quantities of parameters whose names do not say them.
        dtype: Dtype of the cases.

    Raises:
        UserError: The function cannot be called, or returns what cannot be compared.
    """
    _, paper = algorithm_named(algorithm)
    interface, own = _interface(kind, paper)
    known = {each for case in interface.cases for each in case.given if not each.startswith("_")} & NAMES.keys()
    known |= {"total_tokens", "total_rows", "world_size", "parts", "reduce", "config", *_MORE[kind]}
    known |= {"index"} if "group" in known else set()
    function = Function.of(call, name, known, settings or {}, names or {}, (paper.low, paper.high))
    for term, taken, option in _BY_WHAT_IS_TAKEN:
        if term in own and taken[0] == function.has(taken[1]):
            own[term] = option
    if paper.baseline == "return":
        function = replace(function, settings={**function.settings, "lam": 1.0})  # it has none
    watched: list[_Watched] = []
    failures: list[UserError] = []
    for is_bool in (False, True):  # of the mask, for a function that takes entries by it
        for given_as, form in _forms(kind, function):
            called = replace(function, advantages=given_as, mask_is_bool=is_bool)
            try:
                watched.append(_Watched(interface, own, called, _views(interface, called, form, micro, ranks, dtype)))
            except UserError as error:
                failures.append(error)
        if watched:
            break
    if not watched:
        raise failures[0]
    if len(watched) > 1:  # the right form first
        watched = sorted(watched, key=lambda each: (len(each.raised), -each.likeness))
    for each in watched:
        if sets := each.explained(deep=False):
            return each.finding(sets)
    return watched[0].finding(watched[0].explained(deep=True))


# What each kind of function may take other than the quantities of its cases.
_MORE: Mapping[str, tuple[str, ...]] = {
    "advantages": ("gamma", "lam", "eps"),
    "loss": ("clip_low", "clip_high", "clip_range", "kl_coef", "max_length"),
    "aggregation": ("share", "max_length", "token_scores"),
    "normalization": (),
    "logprobs": ("temperature", "model"),
}
# Options that are the algorithm's own where a quantity is taken, or is not.
_BY_WHAT_IS_TAKEN = (
    ("importance weights", (False, "rollout_logprobs"), "none"),
    ("KL estimator", (False, "ref_logprobs"), "none"),
    ("selection", (True, "token_scores"), "whole"),
    ("baseline of rejected rows", (True, "token_rewards"), "counted"),  # there the mask says how long a row is, too
)


def _interface(kind: Kind, algorithm: Algorithm) -> tuple[Interface, dict[str, str]]:
    """The interface for functions of a kind, and the algorithm's own options."""
    of_tokens = algorithm.baseline in ("gae", "return")
    if kind == "loss":
        first = loss_interface(0.75 * algorithm.low)
    elif kind == "advantages":
        first = TOKENS if of_tokens else GROUP
    else:
        first = {"aggregation": AGGREGATION, "normalization": WHITENING, "logprobs": LOGPROBS}[kind]
    baseline = {"gae": "subtracted", "return": "ignored"}.get(algorithm.baseline, algorithm.baseline)
    options = {**vars(algorithm), "baseline": baseline}
    taken = {"loss": ("ratio", "clip", "denominator"), "advantages": ("baseline", "normalization")}
    names = {"aggregation": ("denominator",), **taken}.get(kind, ())
    return first, {term: next(iter(options)) for term, options in first.terms.items()} | {x: options[x] for x in names}


def _forms(kind: Kind, function: Function) -> list[tuple[str, str]]:
    """The ways to give advantages and to read the output that are to be tried, where that is not known beforehand."""
    if kind == "logprobs":
        first = "model" if function.has("model") else "aligned" if function.has("targets") else "shifted"
        return [("tokens", first)] if first == "aligned" else [("tokens", first), ("tokens", f"{first} before")]
    return [("tokens", ""), ("rows", "")] if function.has("advantages") else [("tokens", "")]


def _views(
    interface: Interface, function: Function, form: str, micro: str | None, ranks: str | None, dtype: torch.dtype
) -> Iterator[View]:
    cuts: list[tuple[str, str]] = []
    if interface.name in ("loss", "aggregation"):
        cuts += [("micro-batches", micro or "sum")] if micro or function.has("parts") else []
        cuts += [("ranks", ranks or "sum")] if ranks or function.has("reduce") else []
    elif interface is GROUP or (interface is WHITENING and function.has("reduce")):
        cuts = [("ranks", "rows")]
    for case in interface.cases:
        uneven = interface is GROUP and not case.is_even and not function.has("group", "index")
        if (case.needs and not function.has(case.needs)) or uneven:
            continue
        settings = {name: x for name, x in function.settings.items() if name not in case.given}
        given = {**settings, **{name: _cast(x, dtype) for name, x in case.given.items() if not name.startswith("_")}}
        given |= {name: function.settings[name] for name in NEUTRAL if name in given and not function.has(name)}
        for cut, combine in [("whole", ""), *(cuts if case.parts else ())]:
            yield View(case, cut, combine, form, given)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float64 else x


class _Watched:
    """The results of a function in all cases, and the search for changes that explain them.

    Args:
        interface: Interface of the function's kind, with the reference.
        own: The algorithm's own options.
        function: The function.
        views: Views with which the function is called.

    Attributes:
        observed: Results of the cases.
        raised: Cases in which it raised: the case, its term, and the error.
        notes: Remarks that are not differences.
    """

    def __init__(self, interface: Interface, own: Choice, function: Function, views: Iterable[View]) -> None:
        self._interface, self._own, self._function = interface, own, function
        self.observed: list[Observed] = []
        self.raised: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        for view in views:
            try:
                self.observed += self._seen(view)
            except UserError as error:
                if not self.observed:
                    raise
                self.raised.append((str(view), view.case.term, str(error).removeprefix(function.name).strip()))
        self._cuts = {each.view.cut for each in self.observed}
        self._terms = self._examined()
        self._telling = sorted(self.observed, key=lambda each: each.gradient)  # values first: they take less time
        self._expected: dict[Any, Tensor] = {}

    def _examined(self) -> Terms:
        """The terms that can be examined through what the function takes."""
        has = self._function.has
        left_out = {term for term, needed in self._interface.needs.items() if not has(needed)}
        left_out |= {"clip range"} if has("clip_low", "clip_high", "clip_range", "config") else set()
        left_out |= {f"denominator of {cut}" for cut in ("micro-batches", "ranks") if cut not in self._cuts}
        of_kl = () if has("ref_logprobs") else ("part, KL", "part, surrogate")
        return {
            term: {name: each for name, each in options.items() if name not in of_kl}
            for term, options in self._interface.terms.items()
            if term not in left_out
        }

    def _called(self, view: View) -> tuple[Tensor, View]:
        """The output, and the view with the tensors that it was given."""
        given = {key: x.clone() if isinstance(x, Tensor) else x for key, x in view.given.items()}
        if self._interface.differentiates is not None:
            given[self._interface.differentiates].requires_grad_(True)
        fresh = replace(view, given=given)
        with errors_naming(self._function.name, view):
            return first_tensor(self._function.output(fresh), self._function.name), fresh

    def _seen(self, view: View) -> list[Observed]:
        """The entries of a view: the output, and its gradient if the function is one to descend."""
        name, by, is_first = self._function.name, self._interface.differentiates, not self.observed
        try:
            output, fresh = self._called(view)
            if not output.isfinite().all() and (view.case.edge or is_first):
                raise UserError(f"{name} returned {_first_broken(output)} on '{view}'; finite numbers are expected")
        except UserError as error:
            if not view.case.edge:
                raise
            what = str(error).removeprefix(name).replace(f" on '{view}'", "")
            for advice in (CORRECT_IT, "; finite numbers are expected"):
                what = what.removesuffix(advice)
            self.notes.append(f"{view}:{what} ({view.case.edge})")
            return []
        if is_first:
            self._check_calls(view, output, fresh)
        form = view.form or _form_of(output, view, self._interface)
        shown = replace(fresh, form=form)
        _check_shape(output, shown, name)
        entries = self._interface.compared(shown, output)
        seen = [Observed(replace(view, form=form), entries.detach().double().flatten(), gradient=False)]
        if by is None:
            return seen
        if not entries.requires_grad:
            raise UserError(
                f"{name} returned a value without a gradient to `{by}`; compute the loss from `{by}` without `detach`"
            )
        gradient = _gradient(entries, fresh.given[by])
        if view.case.edge and not gradient.isfinite().all():
            self.notes.append(f"{view}: its gradient has {_first_broken(gradient)} ({view.case.edge})")
            return seen
        return [*seen, Observed(replace(view, form=form), gradient.double().flatten(), gradient=True)]

    def _check_calls(self, view: View, output: Tensor, fresh: View) -> None:
        """Refuse a function that changes what it is given, or that returns something else when it is called again."""
        name = self._function.name
        for key, x in view.given.items():
            if isinstance(x, Tensor) and not torch.equal(fresh.given[key].detach(), x):
                raise UserError(f"{name} changes its argument {key} `{list(x.shape)}`; change a copy instead")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            before = torch.get_rng_state()
            again, _ = self._called(view)
            drew = not torch.equal(before, torch.get_rng_state())
        if drew or not torch.equal(again, output):
            raise UserError(
                f"{name} draws random numbers: two calls with the same arguments must give the same;"
                " give a function that draws none"
            )

    def expected(self, observed: Observed, choice: Choice) -> Tensor:
        """The entries that a right function with some options has in place of `observed.entries`."""
        key = (id(observed), *choice.values())
        if key not in self._expected:
            view, by = _in_float64(observed.view), self._interface.differentiates
            if by is None or not observed.gradient:
                with torch.no_grad():
                    entries = self._interface.compared(view, self._interface.reference(view, choice))
            else:
                x = view.given[by].clone().requires_grad_(True)
                view = replace(view, given={**view.given, by: x})
                entries = _gradient(self._interface.compared(view, self._interface.reference(view, choice)), x)
            self._expected[key] = entries.flatten()
        return self._expected[key]

    def _is_near(self, observed: Observed, choice: Choice) -> bool:
        """Whether the function with these options shows what was observed."""
        entries, tolerance = self.expected(observed, choice), observed.view.case.tolerance
        if entries.shape != observed.entries.shape:
            return False
        if not entries.numel():
            return True
        largest = max(1.0 if tolerance > 1e-3 else 1e-2, float(entries.abs().max().nan_to_num()))
        return bool(((entries - observed.entries).abs() <= tolerance * largest).all())

    def _matched(self, choice: Choice, all_or_none: bool) -> int:
        """Number of observations that these options give; with `all_or_none` 0 if they do not give all."""
        if not all_or_none:
            return sum(self._is_near(each, choice) for each in self._telling)
        for place, each in enumerate(self._telling):
            if not self._is_near(each, choice):
                if not each.gradient:
                    self._telling.insert(0, self._telling.pop(place))  # it may tell the next options apart as well
                return 0
        return len(self._telling)

    @property
    def likeness(self) -> int:
        """The number of first observations that are explained by at most one change."""
        choices = [self._own, *(chosen(self._own, [each]) for each in changes_from(self._own, self._terms))]
        return max(sum(self._is_near(each, choice) for each in self.observed[:4]) for choice in choices)

    def explained(self, deep: bool) -> list[tuple[Change, ...]]:
        """The sets of changes that explain all observations, by `explanations`."""
        return explanations(self._own, self._terms, self._matched, len(self.observed), deep)

    def finding(self, sets: list[tuple[Change, ...]]) -> Diagnosis:
        """The diagnosis, with the sets of changes that explain the observations, if there are any."""
        function = self._function
        changes = sets[0] if sets else self._scaled()
        lost, unexplained = ((), ()) if changes or sets else self._unexplained()
        if not sets and not changes:
            changes = self._nearest()
        unexplained = (*unexplained, *self.raised)
        wrong = lost or unexplained or any(not each.is_convention for each in changes)
        verdict: Verdict = "differs" if wrong else "convention" if changes else "conforms"
        given = "given advantages [B], " if function.has("advantages") and function.advantages == "rows" else ""
        form = f"{given}returns {self.observed[0].view.form or 'entries'}"
        notes = dict.fromkeys([*self.notes, *([] if unexplained else self._more_notes())])
        return Diagnosis(verdict, changes, tuple(sets[1:]), unexplained, lost, tuple(notes), form)

    def _scaled(self) -> tuple[Change, ...]:
        """The change that multiplies every output by a factor, if that explains all; else nothing."""
        for conventions in ((), *((each,) for each in changes_from(self._own, self._terms) if each.is_convention)):
            scales = self._scales(chosen(self._own, conventions))
            if scales:
                low, high = min(scales), max(scales)
                same = high - low <= 1e-4 * abs(high)
                text = f"everything is {high:.6g}" if same else f"cases are {low:.6g} to {high:.6g}"
                term = "denominator" if "denominator" in self._terms else "normalization"
                if not same and term == "normalization":
                    return ()
                return (Change(term, "", f"{text} times what it should be", False), *conventions)
        return ()

    def _scales(self, choice: Choice) -> list[float]:
        """The factor between each case's entries and the expected ones; empty if a case is not a multiple."""
        scales = []
        for each in self.observed:
            right = self.expected(each, choice)
            if right.shape != each.entries.shape:
                return []
            scale = float((each.entries * right).sum() / right.square().sum().clamp(min=1e-12))
            if each.view.case.tolerance < 1e-3 and right.abs().max() > 1e-6:
                if abs(scale) < 1e-6 or not torch.allclose(each.entries, scale * right, rtol=1e-4, atol=1e-6):
                    return []
                scales.append(scale)
        return scales

    def _nearest(self) -> tuple[Change, ...]:
        """The conventions with which most of the cases are explained."""
        best: tuple[Change, ...] = ()
        for _ in range(2):  # one after the other, as long as each explains more
            conventions = [each for each in changes_from(self._own, self._terms) if each.is_convention]
            more = [(*best, each) for each in conventions if each.term not in {x.term for x in best}]
            best = max([best, *more], key=lambda each: self._matched(chosen(self._own, each), False))
        return best

    def _unexplained(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str, str], ...]]:
        """Properties of right functions that this one lacks, by terms; and the cases that differ, with the numbers."""
        right = chosen(self._own, self._nearest())
        missed = [each for each in self.observed if not self._is_near(each, right)]
        outcomes = {each.view.case.name: _outcome(each, self.expected(each, right)) for each in reversed(missed)}
        cases = tuple((x.name, x.term, outcomes[x.name]) for x in dict.fromkeys(each.view.case for each in missed))
        lost = [*self._lost(right), *self._looked_at(missed, right)]
        return tuple(dict.fromkeys(lost)), cases

    def _lost(self, choice: Choice) -> Iterator[tuple[str, str]]:
        """The properties that the function does not have."""
        interface, function = self._interface, self._function
        views = [each.view for each in self.observed if str(each.view) == interface.typical]

        def found(given: Given) -> Tensor:
            fresh = replace(
                views[0], given={key: x.clone() if isinstance(x, Tensor) else x for key, x in given.items()}
            )
            with errors_naming(function.name, fresh):
                return interface.compared(fresh, first_tensor(function.output(fresh), function.name)).detach().double()

        def right(given: Given) -> Tensor:
            fresh = replace(views[0], given=given)
            return interface.compared(fresh, interface.reference(fresh, choice)).double()

        for each in broken(interface.properties, views[0].given, found, right) if views else ():
            yield each.term, each.text

    def _looked_at(self, missed: Sequence[Observed], choice: Choice) -> Iterator[tuple[str, str]]:
        """Findings from the first case that differs: from its groups, or from gradients if few terms matter in it."""
        first, view = missed[0], missed[0].view
        found, right, given = first.entries, self.expected(first, choice), _in_float64(view).given
        if view.cut != "whole":
            return
        if self._interface is GROUP:
            if view.form != "rows":  # of each row its first token that counts
                firsts = given["mask"].cumsum(1)[given["mask"] != 0] == 1
                found, right = found[firsts], right[firsts]
            if len(found) == len(given["rewards"]):
                yield of_groups(found, right, given["rewards"], given["group"])
        if self._interface is WHITENING and given["mask"].all():
            yield of_groups(found, right, given["x"].flatten(), torch.zeros(given["x"].numel()))
        if view.case is self._interface.cases[0] and self._interface.differentiates is not None:
            by = given["advantages" if self._interface.differentiates == "logprobs" else "loss"]
            gradient = next(each for each in self.observed if each.gradient and each.view.case is view.case)
            expected, has_kl = self.expected(gradient, choice).view_as(by), self._function.has("ref_logprobs")
            yield of_weights(gradient.entries.view_as(by), expected, by, has_kl)

    def _more_notes(self) -> list[str]:
        function = self._function
        if function.has("ref_logprobs") and not function.has("kl_coef") and "kl_coef" not in function.chosen:
            expected = function.settings["kl_coef"]
            return [f"it has no parameter `kl_coef`, and {expected} was expected: give its value by --settings.kl_coef"]
        if self._interface.differentiates is None or self.observed[0].view.form != "scalar":
            return []
        return [] if len(self._cuts) > 1 or function.has("parts", "reduce") else [self._parts_note()]

    def _parts_note(self) -> str:
        """Note on how the values of two micro-batches become the value of the whole, where the user did not say."""
        whole = [each for each in self.observed if each.view.case.parts and not each.gradient]
        for combine in ("sum", "mean"):
            if all(self._of_parts(each, combine) for each in whole):
                return f"the {combine} of its values on two micro-batches of equal size is its value on the whole batch"
        return (
            "its value on the whole batch is neither the sum nor the mean of its values on two micro-batches: each of"
            " these is divided by the count of its own micro-batch. Divide by a parameter `total_tokens` (the count of"
            " the whole batch), or say by --micro and --ranks how the trainer combines such values"
        )

    def _of_parts(self, observed: Observed, combine: str) -> bool:
        value = self._called(replace(observed.view, cut="micro-batches", combine=combine))[0].detach().double()
        return torch.allclose(value.flatten(), observed.entries, rtol=1e-4, atol=1e-6)


def _gradient(entries: Tensor, x: Tensor) -> Tensor:
    """The gradient of the sum of the entries, 0 where there is none."""
    found = torch.autograd.grad(entries.sum(), x, allow_unused=True)[0] if entries.requires_grad else None
    return torch.zeros_like(x) if found is None else found


def _first_broken(output: Tensor) -> str:
    return "NaN" if output.isnan().any() else "infinity"


def _form_of(output: Tensor, view: View, interface: Interface) -> str:
    if interface.name in ("loss", "aggregation"):
        return "scalar" if output.numel() == 1 else "tokens"
    if interface is GROUP:
        return "rows" if list(output.shape) == [len(view.given["rewards"])] else "tokens"
    return ""


def _check_shape(output: Tensor, view: View, name: str) -> None:
    mask = view.given["mask"]
    shapes = {"scalar": [[], [1]], "rows": [[len(mask)]]}.get(view.form, [list(mask.shape)])
    if view.form.startswith(("model", "shifted")):
        shapes = [[len(mask), mask.shape[1] - 1], list(mask.shape)]
    if list(output.shape) not in shapes:
        wanted = " or ".join(str(each) for each in shapes)
        if view.form == "tokens" and view.cut == "whole":
            wanted = f"one number or {wanted}"
        raise UserError(f"{name} returned the shape {list(output.shape)} on '{view}'; {wanted} is expected")


def _in_float64(view: View) -> View:
    given = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in view.given.items()}
    return replace(view, given=given)


def _outcome(observed: Observed, expected: Tensor) -> str:
    what = "gradient" if observed.gradient else "value"
    if expected.shape != observed.entries.shape:
        return f"{list(observed.entries.shape)} entries, {list(expected.shape)} expected"
    at = int((observed.entries - expected).abs().nan_to_num(nan=torch.inf).argmax())
    where = f" of entry {at}" if expected.numel() > 1 else ""
    cut = "" if observed.view.cut == "whole" else f", in {observed.view.cut}"
    return f"{what}{where} {observed.entries[at]:.6g}, expected {expected[at]:.6g}{cut}"
