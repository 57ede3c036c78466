"""`OwnDraws`, process-wide random numbers that one environment has for itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class OwnDraws:
    """States of `random` and of NumPy's legacy generator, in place of the process's for as long as a call takes.

    Args:
        seed: Not below 0; the same gives the same numbers. None for the states that are there.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._states: tuple[Any, Any] = random.getstate(), np.random.get_state()
        if seed is not None:
            self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    def to_json(self) -> list[Any]:
        """The states."""
        (version, numbers, gauss), of_numpy = self._states
        kind, array, *rest = of_numpy
        return [[version, list(numbers), gauss], [kind, array.tolist(), *rest]]

    @classmethod
    def from_json(cls, states: list[Any]) -> OwnDraws:
        """States that `to_json`, or a worker, gave."""
        (version, numbers, gauss), of_numpy = states
        draws = cls()
        draws._states = (version, tuple(numbers), gauss), tuple(of_numpy) if of_numpy is not None else draws._states[1]
        return draws

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the process draws from these states; afterwards from what was there. For one thread at a time."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
