"""`Entry`, what a config writes of a node, with the place of each of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.dag.problems import Problem

Place = tuple[str, int]  # the file, and the line in it


@dataclass(frozen=True)
class Entry:
    """One entry of `nodes` in a config.

    Attributes:
        id: The node's.
        keys: As they are written, of the right types; without `id`.
        place: Where the entry begins.
        places: Where its keys are written; those under `parameters` and `dependencies` as `parameters.x`.
    """

    id: str
    keys: Mapping[str, Any]
    place: Place
    places: Mapping[str, Place]

    def problem(self, text: str, key: str = "") -> Problem:
        """What is wrong with it, reported at the line of `key`."""
        return Problem(*self.places.get(key, self.place), f"`{self.id}` {text}")

    def after(self, earlier: Entry | None) -> Entry:
        """This entry as it counts where an `earlier` config writes the same node.

        With a `call` it stands in its place; else it changes what it names and leaves the rest.
        """
        if earlier is None or "call" in self.keys:
            return self
        keys = {**earlier.keys, **self.keys}
        if "parameters" in self.keys:
            keys["parameters"] = {**earlier.keys.get("parameters", {}), **self.keys["parameters"]}
        return Entry(self.id, keys, earlier.place, {**earlier.places, **self.places})
