"""A formula in terms that may be computed in several ways, and the search for the ways that give the numbers found.

A reference is a function of a case and of a `Choice`, one option for each term. The algorithm's own options are what is
right. A wrong implementation is explained when the reference with few other options gives the same numbers, in every
case: the terms whose options were changed are those that it computes in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]
Choice = Mapping[str, str]
MOST_CONVENTIONS = 4  # that are changed at one time; with an error 2
LIKELY = 2  # sets of conventions with which two errors are tried


@dataclass(frozen=True)
class Option:
    """One way to compute a term.

    Attributes:
        text: Description of the computation, as a difference from other ways.
        compute: The computation, a function of its term's arguments; None where the reference knows it by its name.
        instead_of: Options that it is an alternative to by convention: the field makes both choices.
    """

    text: str
    compute: Any
    instead_of: tuple[str, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        """Compute the term."""
        return self.compute(*arguments)


Terms = Mapping[str, Mapping[str, Option]]


@dataclass(frozen=True)
class Property:
    """A change of the case that changes no output.

    Attributes:
        term: The term that is wrong where it does.
        text: Description of what is seen then.
        change: The change, of a copy of the quantities.
    """

    term: str
    text: str
    change: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Case:
    """A batch that a function is called with.

    Attributes:
        name: Description of what is particular about it.
        term: The term that makes a difference in it, while those of earlier cases make none or are right.
        given: Quantities by name; those of rows have the rows first.
        parts: Rows of each part into which the batch is cut; empty for a case that is called whole alone.
        is_even: Groups are of one size and stand in order, so that a function that knows the size alone is right.
        tolerance: Largest difference allowed in an output, relative to the largest or to 1.
        edge: Reason why a right function may have no answer: an error or NaN is then only noted; empty for most cases.
        needs: A quantity that a function must take to be called with it.
    """

    name: str
    term: str
    given: Given
    parts: tuple[tuple[int, ...], ...] = ()
    is_even: bool = False
    tolerance: float = 2e-5
    edge: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Interface:
    """A kind of function, with the reference that it is compared with.

    Attributes:
        name: Name of the option of the command line.
        cases: Batches, from the one in which fewest terms matter.
        terms: The ways to compute each term.
        reference: Function from a view and a choice to the result of a right function with these options.
        compared: Function from a view and an output to the entries that are compared.
        typical: Name of the case in which its properties are tried.
        properties: Properties of every right function, tried where no options explain the output.
        needs: Quantities that a function must take for a term to be examined; the other terms always are.
        differentiates: The quantity by which outputs are differentiated; None for constants.
    """

    name: str
    cases: Sequence[Case]
    terms: Terms
    reference: Callable[[View, Choice], Tensor]
    compared: Callable[[View, Tensor], Tensor]
    typical: str
    properties: Sequence[Property]
    needs: Mapping[str, str] = field(default_factory=dict)
    differentiates: str | None = None


@dataclass(frozen=True)
class View:
    """A case as a function is called with it.

    Attributes:
        case: The case.
        cut: `whole`, `micro-batches` or `ranks`.
        combine: Way in which the outputs of parts become one: their `sum`, their `mean`, or put together by `rows`.
        form: Form of the output: one number, `scalar`, or `tokens`.
        given: Quantities of the case, with the settings.
    """

    case: Case
    cut: str
    combine: str
    form: str
    given: Given

    def parts(self) -> list[Given]:
        """The quantities of each part."""
        return [rows_of(self.given, rows) for rows in self.case.parts]

    def in_order(self, of_parts: Sequence[Tensor]) -> Tensor:
        """Rows of the parts, in the order of the whole."""
        rows = torch.cat(list(of_parts))
        order = torch.tensor([row for part in self.case.parts for row in part]).argsort()
        return rows if self.cut == "whole" else rows[order]

    def __str__(self) -> str:
        return self.case.name if self.cut == "whole" else f"{self.case.name}, in {self.cut}"


def rows_of(given: Given, rows: Sequence[int]) -> dict[str, Any]:
    """The quantities of some rows; numbers stay as they are."""
    chosen = list(rows)
    return {name: x[chosen] if isinstance(x, Tensor) and x.dim() else x for name, x in given.items()}


@dataclass(frozen=True)
class Change:
    """A term that is computed in another way than the algorithm's own.

    Attributes:
        term: The term.
        option: Name of the other way.
        text: Description of the other way.
        is_convention: Whether the field uses both ways.
    """

    term: str
    option: str
    text: str
    is_convention: bool


def changes_from(own: Choice, terms: Terms) -> list[Change]:
    """All single changes of the algorithm's own options."""
    return [
        Change(term, name, option.text, own[term] in option.instead_of)
        for term, options in terms.items()
        for name, option in options.items()
        if name != own[term]
    ]


def explanations(
    own: Choice, terms: Terms, matched: Callable[[Choice, bool], int], number: int, deep: bool
) -> list[tuple[Change, ...]]:
    """The sets of changes that give the numbers found: of the fewest errors, then of the fewest conventions.

    Several where the cases cannot tell them apart; `[()]` where the algorithm's own options give the numbers; empty
    where nothing that was tried does.

    Args:
        own: The algorithm's own options.
        terms: Terms that are examined.
        matched: Number of observations that the reference with given options matches; if only all are of interest, it
            may stop at the first that it does not give.
        number: Number of observations.
        deep: Try two errors at one time, too, with the likeliest conventions.
    """
    every = changes_from(own, terms)
    conventions = [each for each in every if each.is_convention]
    errors = [each for each in every if not each.is_convention]

    def fitting(wrong: Sequence[tuple[Change, ...]], sets: Sequence[tuple[Change, ...]]) -> list[tuple[Change, ...]]:
        found: list[tuple[Change, ...]] = []
        for changed in (one + more for more, one in product(sets, wrong)):
            if found and len(changed) > len(found[0]):
                break  # in order of their number
            if len({each.term for each in changed}) == len(changed) and matched(chosen(own, changed), True) == number:
                found.append(changed)
        return found

    small = _sets(conventions, 0, 2)
    found = fitting([()], _sets(conventions, 0, MOST_CONVENTIONS)) or fitting(_sets(errors, 1, 1), small)
    if found or not deep:
        return found
    likely = sorted(small, key=lambda more: -matched(chosen(own, more), False))[:LIKELY]
    return fitting(_sets(errors, 2, 2), sorted(likely, key=len))


def chosen(own: Choice, changes: Iterable[Change]) -> Choice:
    """The algorithm's own options with some changes."""
    return {**own, **{each.term: each.option for each in changes}}


def _sets(changes: Sequence[Change], least: int, most: int) -> list[tuple[Change, ...]]:
    """Sets of changes of different terms, small ones first."""
    sets = (each for number in range(least, most + 1) for each in combinations(changes, number))
    return [each for each in sets if len({change.term for change in each}) == len(each)]
