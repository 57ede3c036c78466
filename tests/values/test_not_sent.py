"""A field that was not sent: every use raises, and the value that has it can be copied."""

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
from rlflow.values.not_sent import NotSent

NOT_SENT: Any = NotSent("texts", "ask for `WithTexts`")

USES: dict[str, Callable[[], object]] = {
    "==": lambda: NOT_SENT == "4",
    "!=": lambda: NOT_SENT != "4",
    "== from the left": lambda: torch.zeros(2) == NOT_SENT,
    "<": lambda: NOT_SENT < 1,
    ">=": lambda: NOT_SENT <= 1,
    "truth": lambda: bool(NOT_SENT),
    "if": lambda: 1 if NOT_SENT else 2,
    "in": lambda: "4" in NOT_SENT,
    "in a list": lambda: NOT_SENT in ["4"],
    "for": lambda: list(NOT_SENT),
    "len": lambda: len(NOT_SENT),
    "index": lambda: NOT_SENT[0],
    "attribute": lambda: NOT_SENT.dtype,
    "method": lambda: NOT_SENT.sum(),
    "hash": lambda: {NOT_SENT},
    "+": lambda: NOT_SENT + 1,
    "- from the left": lambda: torch.ones(2) - NOT_SENT,
    "//": lambda: NOT_SENT // 2,
    "%": lambda: NOT_SENT % 2,
    "float": lambda: float(NOT_SENT),
    "torch": lambda: torch.exp(NOT_SENT),
    "torch of a list": lambda: torch.cat([torch.zeros(1), NOT_SENT]),
    "where": lambda: torch.where(torch.tensor([True]), NOT_SENT, 0.0),
    "tensor": lambda: torch.as_tensor(NOT_SENT),
}


@dataclass(frozen=True)
class Value:
    number: Tensor
    texts: Any


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_use_raises_one_line_with_the_field_and_what_to_write(use: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=r"^`texts` was not sent here; ask for `WithTexts`$"):
        use()


def test_a_field_that_was_not_sent_is_shown_as_not_sent() -> None:
    value = Value(torch.tensor(1), NOT_SENT)
    assert repr(value) == "Value(number=tensor(1), texts=<texts: not sent here>)"
    assert f"{NOT_SENT}" == "<texts: not sent here>"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_value_with_a_field_that_was_not_sent_is_replaced_copied_and_pickled(
    copied: Callable[[Value], Value],
) -> None:
    other = copied(replace(Value(torch.tensor(1), NOT_SENT), number=torch.tensor(2)))
    assert other.number == 2
    with pytest.raises(UserError, match="`texts` was not sent here; ask for `WithTexts`"):
        len(other.texts)
