"""Copies of arguments, for code in the rank's own process that may change them as code in a worker may."""

from __future__ import annotations

import random
from array import array
from collections import deque
from copy import copy, deepcopy
from typing import Any

import numpy as np
from torch import Generator, Tensor

WHOLE = (random.Random, np.random.Generator, np.random.RandomState, Generator, Tensor)  # not subclasses: parameters


def copied(value: Any) -> Any:
    """A value with data of its own; other objects, such as clients, locks and models, are the same ones.

    Data are lists, tuples, dicts, sets, deques, arrays and tensors, also in each other, and generators of random
    numbers.
    """
    if isinstance(value, dict | list | deque):
        own = copy(value)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            own[key] = copied(each)
        return own
    if type(value) is tuple:
        return tuple(map(copied, value))
    if isinstance(value, set | bytearray | array | np.ndarray):
        return copy(value)
    return deepcopy(value) if type(value) in WHOLE else value
