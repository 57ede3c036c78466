"""Checks of `generate` and `converse` calls in a node, and `GenerationHistory`: what the node has generated so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.dag.node import Node
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.values.batch import Batch, Pairs
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.path import RowPath
from rlflow.values.picture import Picture
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Rollout


def policy_of(node: Node, policy: str | None) -> str:
    """The policy that a node generates with: `policy`, or where that is None the only one of its `generates`.

    Raises:
        UserError: The node is not marked with it, or names several and `policy` is None.
    """
    if node.kind != "rollout":
        marked = f'generates="{policy}"' if policy is not None else "generates=..."
        raise UserError(f"node `{node.id}` generates and is not marked to; write `@node({marked})` ({node.place})")
    if policy is None and len(node.generates) == 1:
        return node.generates[0]
    named = ", ".join(f"'{each}'" for each in node.generates)
    if policy is None:
        calls = " or ".join(f"self.{each}.generate" for each in node.generates)
        raise UserError(f"node `{node.id}` generates with {named}, so `self.generate` does not say which; call {calls}")
    if policy not in node.generates:
        raise UserError(
            f"node `{node.id}` calls `self.{policy}.generate` and is marked to generate with {named}; add {policy!r} to"
            f" its `generates` ({node.place})"
        )
    return policy


def callers_of(parents: RowPath, node: Node) -> list[tuple[int, ...]]:
    """The paths of the rows that are generated from, as tuples such as `(7, 1)`; a row must not be there twice."""
    callers = [tuple(path) for path in parents.numbers.tolist()]
    if len(set(callers)) < len(callers):
        raise UserError(
            f"node `{node.id}` generates from one row twice in a call, and both would sample the same; ask for more"
            " responses by `n`, or call `generate` again"
        )
    return callers


def parents_of(rows: Any, node: Node, own: RowPath) -> RowPath:
    """The paths of the rows that `generate` answers or continues, on the host.

    Args:
        rows: The first argument of `generate`; one without a path stands for the node's own rows, in their order.
        node: The node that generates.
        own: Paths of the rows that the node sees on this rank.

    Raises:
        UserError: `rows` is not a `Batch`, `Pairs` or `Rollout`, or has rows that are not below those of the node.
    """
    if not isinstance(rows, Batch | Pairs | Rollout):
        raise UserError(
            f"node `{node.id}` generates from a {type(rows).__name__}; give prompts, such as `batch` or the result of"
            " `as_prompts`, or a `Rollout` to continue"
        )
    if rows.path is None and len(rows.prompt_ids) == len(own):
        return own
    if rows.path is None:
        raise UserError(
            f"node `{node.id}` generates from {len(rows.prompt_ids)} rows without a path where it sees {len(own)}; take"
            " them from a value that it reads, or give the `Batch` its `path`"
        )
    if rows.path.levels[: len(own.levels)] != own.levels:
        raise UserError(
            f"node `{node.id}` sees rows of {' > '.join(own.levels)} and generates from rows of"
            f" {' > '.join(rows.path.levels)}, which descend from others; generate from rows below those it reads"
        )
    return replace(rows.path, numbers=on_host(rows.path.numbers))


def pictures_of(rows: Any, album: Callable[[Sequence[int]], Sequence[Picture]]) -> list[Sequence[Picture]]:
    """The pictures of each of these prompts; an empty list if no prompt has any.

    Args:
        rows: `Batch`, `Pairs` or `Rollout`.
        album: Numbers of pictures to the pictures.
    """
    numbers = rows.pictures
    if not isinstance(numbers, Ragged) or not len(numbers.values):
        return []
    return [album(of_row.tolist()) for of_row in numbers.on_host().rows()]


def require_beginning(rows: Any, node: Node, environment: Environment, cut_off: bool) -> None:
    """Refuse rows that no conversation can begin from, and games that would be cut off.

    Args:
        rows: The first argument of `converse`.
        node: The node that converses.
        environment: Environment that answers.
        cut_off: Whether the run cuts responses off, to continue them with the next prompts.
    """
    if not isinstance(rows, Batch):
        raise UserError(
            f"node `{node.id}` begins conversations from a {type(rows).__name__}; they begin from prompts of the"
            " dataset, such as `batch`"
        )
    if cut_off:
        require_no_seats(f"node `{node.id}` converses", environment)


def require_no_seats(what: str, environment: Environment) -> None:
    """Refuse games of several seats if `trainer.partial_rollout` is set.

    Args:
        what: Beginning of the error's sentence, such as "node `games` converses".
        environment: The environment, whose definitions may have seats.
    """
    for definition in environment.definitions.values():
        if definition.seats:
            raise UserError(
                f"{what} with {definition.path}, which has the seats {', '.join(definition.seats)}, and"
                " `trainer.partial_rollout` is set; a game cannot be cut off, since its seats depend on each other."
                " Leave `partial_rollout` out"
            )


def require_own_rows(
    rows: Rollout, node: Node, policy: str, writers: Mapping[str, tuple[str, ...]], cut_off: bool
) -> None:
    """Refuse to continue another policy's rows, conversations, or rows that partial rollout continues itself.

    Args:
        rows: The first argument of `generate`.
        node: The node that generates.
        policy: The policy that it generates with.
        writers: Policies of each node that generates, by node.
        cut_off: Whether the run cuts responses off, to continue them with the next prompts.
    """
    if len(rows.segments.values):
        raise UserError(
            f"node `{node.id}` continues conversations by `generate`, and an environment answers in them; begin longer"
            " ones by `converse`, or make prompts of them by `as_prompts`"
        )
    if cut_off:
        raise UserError(
            f"node `{node.id}` continues responses, and so does `trainer.partial_rollout`, with the next prompts; leave"
            " `partial_rollout` out"
        )
    level = rows.path.levels[-1]
    if writers[level] != (policy,):
        raise UserError(
            f"node `{node.id}` continues rows of `{level}`, which {' and '.join(writers[level])} wrote, with"
            f" `{policy}`, and log-probabilities of a row are of one policy; continue them with the policy that wrote"
            " them, or make prompts of them by `as_prompts`"
        )


Path = tuple[int, ...]  # of a row


@dataclass
class GenerationHistory:
    """The calls of `generate` and `converse` that a node has made so far while it runs once.

    They give a second call on the same row other seeds and paths than the first:

        generate(batch, n=2)    rows 7 0 and 7 1 of prompt 7
        generate(batch, n=2)    rows 7 2 and 7 3

    Attributes:
        tokens: Tokens that were sampled in these calls.
        temperatures: Temperatures of the rows that its calls made, by policy, as in `Rollout.temperature`.
    """

    tokens: int = 0
    temperatures: dict[str, set[float]] = field(default_factory=dict)
    _count: Counter[Path] = field(default_factory=Counter)
    _children: Counter[Path] = field(default_factory=Counter)
    _inherited: dict[Path, int] = field(default_factory=dict)  # of each row that was made

    def before(self, parents: Sequence[Path]) -> Tensor:
        """`[B, 2]` int64, how often each of these rows was generated from so far, and how many rows came of it."""
        of_rows = [(self._count[row], self._children[row]) for row in parents]
        return torch.tensor(of_rows, dtype=torch.int64).view(-1, 2)

    def add(self, policy: str, parents: Sequence[Path], made: Rollout) -> None:
        """Note a call, after it.

        Args:
            policy: The policy that generated.
            parents: Paths of the rows that were answered or continued.
            made: Rows that the call made from the parents, on the CPU.
        """
        self._count.update(parents)
        self.tokens += _sampled(made)
        self.temperatures.setdefault(policy, set()).update(made.temperature.tolist())
        paths = [tuple(path) for path in made.path.numbers.tolist()]
        self._children.update(path[:-1] for path in paths)
        self._inherited |= zip(paths, made.inherited.tolist(), strict=True)

    def returned(self, rollout: Rollout, depth: int) -> Rollout:
        """A node's result, changed so that a token which several rows share is in the loss mask of one of them alone.

        That is the first of these rows by path. `inherited` then counts the tokens of rows that the node read. Tokens
        of rows that it made and continued itself, which no other node sees, are not counted.

        Args:
            rollout: Some of the rows that the node made, in any order.
            depth: Numbers in a path of the rows that the node reads; 1 for prompts.
        """
        shares = any(self._inherited.values())
        if not shares and rollout.path.depth <= depth + 1:
            return rollout  # and wait for no copy of its paths
        paths = [tuple(path) for path in on_host(rollout.path.numbers).tolist()]
        if shares:
            mask = self._trained_once(on_host(rollout.loss_mask), paths)
            rollout = replace(rollout, loss_mask=on_device(mask, rollout.loss_mask.device))
        if rollout.path.depth <= depth + 1:
            return rollout
        inherited = torch.tensor([self._inherited[path[: depth + 1]] for path in paths], dtype=torch.int64)
        return replace(rollout, inherited=on_device(inherited, rollout.inherited.device))

    def root_of(self, path: Path) -> Path:
        """The path of the row from which a row was continued in this node, over any number of calls; or its own."""
        while self._inherited.get(path, 0) and path[:-1] in self._inherited:
            path = path[:-1]
        return path

    def _trained_once(self, loss_mask: Tensor, paths: Sequence[Path]) -> Tensor:
        """The loss mask `[B, T]` without the inherited tokens that a row before has in it, in the order of paths."""
        once, taken = loss_mask.clone(), dict[Path, Tensor]()  # by the row that a token came from, `[T]`
        for row in sorted(range(len(paths)), key=paths.__getitem__):
            made_by, end = paths[row], loss_mask.shape[1]
            while made_by in self._inherited:  # of it the tokens from `first` to `end`
                first = min(self._inherited[made_by], end)
                if made_by != paths[row]:
                    _take(once[row], taken, made_by, slice(first, end))
                made_by, end = made_by[:-1], first
            _take(once[row], taken, made_by, slice(0, end))
        return once


def _take(mask: Tensor, taken: dict[Path, Tensor], made_by: Path, tokens: slice) -> None:
    """Leave in a row's mask `[T]` those of the tokens that no row has taken, and note that they are taken."""
    before = taken.setdefault(made_by, torch.zeros_like(mask))
    mask[tokens] &= ~before[tokens]
    before[tokens] |= mask[tokens]


def _sampled(made: Rollout) -> int:
    """The tokens that a policy was asked for, without inherited ones and without those that environments wrote."""
    if not len(made.segments.values):
        return int((made.lengths - made.inherited).sum())
    return int(((made.turn >= 0) & ~made.inherited_mask).sum())
