"""Copies of arguments, for code in the rank's own process that may change them as code in a worker may."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from copy import copy, deepcopy
from typing import Any

import numpy as np
from torch import Generator, Tensor

HOLDS_OTHERS = (list, dict, defaultdict, OrderedDict, Counter, deque)
MOST_BYTES = 2**20  # of an array or a tensor that is copied: larger ones are tables, which code only reads
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, Generator)


def copied(value: Any) -> Any:
    """A value with data of its own; other objects, such as clients, locks and models, are not copied.

    Data are lists, tuples, dicts, sets, deques, arrays and tensors, also in each other, and generators of random
    numbers. Subclasses of these are other objects (a parameter, a memory-mapped array), and so are arrays and tensors
    that are read-only, hold objects or have more than 1 MiB.
    """
    kind = type(value)
    if kind in HOLDS_OTHERS:
        own = copy(value)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            own[key] = copied(each)
        return own
    if kind is tuple:
        return tuple(map(copied, value))
    if kind is Tensor:
        return value.detach().clone() if value.numel() * value.element_size() <= MOST_BYTES else value
    if kind is np.ndarray:
        is_data = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= MOST_BYTES
        return value.copy() if is_data else value
    if kind in GENERATORS:
        return deepcopy(value)
    return copy(value) if kind in (set, bytearray) else value
