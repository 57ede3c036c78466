"""Nodes that a config writes: `NodeConfig`, what it says of one, and `Call`, the function that runs in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlflow.dag.node import Mark, TypeMark
from rlflow.values.cuts import PerSample, PerToken, Scalar
from rlflow.values.each import Each

CUTS = {"PerSample": PerSample, "PerToken": PerToken, "Scalar": Scalar}


@dataclass(frozen=True)
class NodeConfig:
    """A node of a config's `nodes`; its name is the key that it stands under.

    Attributes:
        call: What makes the value: the dotted path of a function, a method of a model (`actor.logprobs`) or of the
            module (`generate`).
        role: As in `@node`, which the function may carry instead; of a model's method the model by itself.
        type: As in `@node`.
        generates: As in `@node`.
        uses: As in `@node`.
        inputs: The values that parameters get, or fields of values (`rollout.group`), where these have other names.
        settings: What parameters get that are no values.
        returns: How the value is cut by rows, where the function is annotated `Tensor` or not at all.
    """

    call: str
    role: str | None = None
    type: TypeMark | None = None
    generates: str | list[str] | None = None
    uses: str | list[str] | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    returns: Literal["PerSample", "PerToken", "Scalar"] | None = None


@dataclass(frozen=True)
class Call:
    """Stands on a module where a class has a method marked `@node`, and is called like one, with values by name.

    Attributes:
        function: What is called.
        mark: What `@node` would say.
        reads: By parameter: the value that it gets, or `value.field`.
        settings: What other parameters get.
        renamed: The parameters of which the config says what they get.
        returns: How the value is cut, where the config says it.
    """

    function: Callable[..., Any]
    mark: Mark
    reads: Mapping[str, str]
    settings: Mapping[str, Any]
    renamed: frozenset[str] = frozenset()
    returns: Any = None

    def __call__(self, **values: Any) -> Any:
        """Call the function."""
        sources = {parameter: source.partition(".") for parameter, source in self.reads.items()}
        given = {each: _part(values[value], of) for each, (value, _, of) in sources.items() if value in values}
        return self.function(**given, **self.settings)


def _part(value: Any, name: str) -> Any:
    """The field of this name; of `Each` that of all its rows."""
    if name and isinstance(value, Each):
        return Each(getattr(value.values, name), value.counts)
    return getattr(value, name) if name else value
