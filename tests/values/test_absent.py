"""A field that was not sent: every use raises, and what holds it can be copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.values.absent import Absent

ABSENT: Any = Absent("texts", "ask for `Written`")

USES: dict[str, Callable[[], object]] = {
    "==": lambda: ABSENT == "4",
    "!=": lambda: ABSENT != "4",
    "== from the left": lambda: torch.zeros(2) == ABSENT,
    "<": lambda: ABSENT < 1,
    ">=": lambda: ABSENT <= 1,
    "truth": lambda: bool(ABSENT),
    "if": lambda: 1 if ABSENT else 2,
    "in": lambda: "4" in ABSENT,
    "in a list": lambda: ABSENT in ["4"],
    "for": lambda: list(ABSENT),
    "len": lambda: len(ABSENT),
    "index": lambda: ABSENT[0],
    "attribute": lambda: ABSENT.dtype,
    "method": lambda: ABSENT.sum(),
    "hash": lambda: {ABSENT},
    "+": lambda: ABSENT + 1,
    "- from the left": lambda: torch.ones(2) - ABSENT,
    "//": lambda: ABSENT // 2,
    "%": lambda: ABSENT % 2,
    "float": lambda: float(ABSENT),
    "torch": lambda: torch.exp(ABSENT),
    "torch of a list": lambda: torch.cat([torch.zeros(1), ABSENT]),
    "where": lambda: torch.where(torch.tensor([True]), ABSENT, 0.0),
    "tensor": lambda: torch.as_tensor(ABSENT),
}


@dataclass(frozen=True)
class Value:
    number: Tensor
    texts: Any


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_use_raises_one_line_with_the_field_and_what_to_write(use: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=r"^`texts` was not sent here; ask for `Written`$"):
        use()


def test_it_is_shown_as_what_it_is() -> None:
    value = Value(torch.tensor(1), ABSENT)
    assert repr(value) == "Value(number=tensor(1), texts=<texts: not sent here>)"
    assert f"{ABSENT}" == "<texts: not sent here>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_value_that_holds_it_is_replaced_copied_and_pickled(copied: Callable[[Value], Value]) -> None:
    other = copied(replace(Value(torch.tensor(1), ABSENT), number=torch.tensor(2)))
    assert other.number == 2
    with pytest.raises(UserError, match="`texts` was not sent here; ask for `Written`"):
        len(other.texts)
