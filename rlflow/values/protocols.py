"""Types for the parameters of nodes: each type names some fields of a value, and only these are sent to the node.

`B` is the number of rows on this rank, `T` the longest response among them. A node that reads fields of two types
declares a type of its own, `class Mine(WithLossMask, Grouped, Protocol): ...`, and may add fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rlflow.values.column_kinds import PerSample, PerToken
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged

_COMPUTED_FROM = "__rlflow_computed_from__"
Method = TypeVar("Method", bound=Callable[..., Any])


class Tokens(Protocol):
    """Prompts and responses, which a model scores."""

    @property
    def prompt_ids(self) -> Ragged:
        """Token ids of each row's prompt."""

    @property
    def response_ids(self) -> PerToken:
        """`[B, T]` int64, right-padded."""

    @property
    def lengths(self) -> PerSample:
        """`[B]` int64, response tokens of each row."""


class WithLossMask(Protocol):
    """The tokens that count, for a node that computes values per token from other values per token."""

    @property
    def loss_mask(self) -> PerToken:
        """`[B, T]` bool, True where a token counts."""

    @property
    def lengths(self) -> PerSample:
        """`[B]` int64, response tokens of each row."""


class TokensWithLossMask(Tokens, WithLossMask, Protocol):
    """Tokens, and which of them count: for a loss that scores its rows."""


class Sampled(TokensWithLossMask, Protocol):
    """Samples of a policy with the engine's log-probabilities, for the policy's loss."""

    @property
    def logprobs(self) -> PerToken:
        """`[B, T]`, log-probabilities from the engine."""

    @property
    def version(self) -> PerSample:
        """`[B]` int64, version of the policy that generated the sample."""


class Grouped(Protocol):
    """The group of each sample, for code that compares the samples of a prompt."""

    @property
    def group(self) -> PerSample:
        """`[B]` int64, equal for samples with the same parent: a prompt, or another row that they answer."""

    @property
    def index(self) -> PerSample:
        """`[B]` int64, the number of each sample among its siblings."""

    @property
    def episode(self) -> PerSample:
        """`[B]` int64, equal for samples of the same episode in a group; an episode counts once in its group."""

    @property
    def first(self) -> PerSample:
        """`[B]` bool, whether a sample is the first of its episode."""

    def group_of(self, level: str) -> PerSample:
        """`[B]` int64, equal for all rows below the same row of `level`, such as `batch`."""


class WithDatasetRows(Protocol):
    """The row of the dataset behind each row, for code that reads its columns."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """`B` rows of the dataset."""


class WithTexts(WithDatasetRows, Protocol):
    """Responses as text, with the dataset's rows: for rewards, and for samples that are logged."""

    @property
    def texts(self) -> list[str]:
        """`B` decoded responses, without special tokens."""

    @property
    def prompt_ids(self) -> Ragged:
        """Token ids of each row's prompt."""

    @property
    def response_ids(self) -> PerToken:
        """`[B, T]` int64, right-padded."""

    @property
    def lengths(self) -> PerSample:
        """`[B]` int64, response tokens of each row."""

    @property
    def policy_lengths(self) -> PerSample:
        """`[B]` int64, number of tokens of each row that the policy wrote; those of an environment do not count."""

    @property
    def turns(self) -> PerSample:
        """`[B]` int64, how many turns of the policy each row has."""

    @property
    def returns(self) -> Tensor:
        """`[B, K]`, the reward of each turn of a conversation; K is 0 if there are no conversations."""

    @property
    def shared_turns(self) -> Tensor:
        """`[B, K]` int64, a number for each turn, equal if rows of an agent's episode share the turn; see `Rollout`."""

    @property
    def messages(self) -> list[list[dict[str, Any]]]:
        """All messages of `B` conversations, see `Rollout`; empty if a response is one turn."""

    @property
    def ended(self) -> PerSample:
        """`[B]` int64, why a conversation ended, see `Rollout`."""

    @property
    def path(self) -> RowPath:
        """Path of each sample, from its prompt."""

    @property
    def index(self) -> PerSample:
        """`[B]` int64, the number of each sample among its siblings."""

    @property
    def episode(self) -> PerSample:
        """`[B]` int64, equal for samples of the same episode in a group; an episode counts once in its group."""

    @property
    def branch(self) -> PerSample:
        """`[B]` int64, number of each row among the rows of its episode, see `Rollout`."""

    @property
    def inherited(self) -> PerSample:
        """`[B]` int64, how many of the first tokens are of the row that this one continues, see `Rollout`."""

    def group_of(self, level: str) -> PerSample:
        """`[B]` int64, equal for all rows below the same row of `level`, such as `batch`."""


def computed_from(*fields: str) -> Callable[[Method], Method]:
    """Mark a property or method of a value with the fields it reads: where a type names it, these fields are sent."""

    def mark(function: Method) -> Method:
        setattr(function, _COMPUTED_FROM, fields)
        return function

    return mark


def fields_behind(member: Any) -> tuple[str, ...] | None:
    """The fields from which a property or a method of a value is computed; None where it has no such mark."""
    found: tuple[str, ...] | None = getattr(getattr(member, "fget", member), _COMPUTED_FROM, None)
    return found
