"""What a call of `generate` or `converse` means in a node: the policy, and the rows that are answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlflow.dag.node import Node
from rlflow.environments.environment import Environment
from rlflow.errors import UserError
from rlflow.values.batch import Batch, Pairs
from rlflow.values.host_copy import on_host
from rlflow.values.path import RowPath
from rlflow.values.rollout import Rollout


def policy_of(node: Node, policy: str | None) -> str:
    """The policy that a node generates with.

    Raises:
        UserError: The node does not name it, or names several and it is not said which.
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
    """The paths of rows that are generated from, each once."""
    callers = [tuple(path) for path in parents.numbers.tolist()]
    if len(set(callers)) < len(callers):
        raise UserError(
            f"node `{node.id}` generates from one row twice in a call, and both would sample the same; ask for more"
            " responses by `n`, or call `generate` again"
        )
    return callers


def parents_of(rows: Any, node: Node, own: RowPath) -> RowPath:
    """The paths of the rows that are answered or continued, on the host.

    Args:
        rows: What `generate` was given.
        node: Which generates.
        own: The paths of the rows that it reads here.

    Raises:
        UserError: They are of another type, or rows that the node does not see.
    """
    if not isinstance(rows, Batch | Pairs | Rollout):
        raise UserError(
            f"node `{node.id}` generates from a {type(rows).__name__}; give prompts, such as `batch` or what"
            " `as_prompts` makes, or a `Rollout` to continue"
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


def require_beginning(rows: Any, node: Node, environment: Environment, cut_off: bool) -> None:
    """Refuse rows from which no conversation begins, or games that would be cut off.

    Args:
        rows: What `converse` was given.
        node: Which converses.
        environment: With which.
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
    """Refuse games of several seats, where `trainer.partial_rollout` is set.

    Args:
        what: What has them, for the error.
        environment: Of games or not.
    """
    for definition in environment.definitions.values():
        if definition.seats:
            raise UserError(
                f"{what} with {definition.path}, which has the seats {', '.join(definition.seats)}, and"
                " `trainer.partial_rollout` is set; a game is not cut off, for the views of its seats hang together."
                " Leave `partial_rollout` out"
            )


def require_own_rows(
    rows: Rollout, node: Node, policy: str, writers: Mapping[str, tuple[str, ...]], cut_off: bool
) -> None:
    """Refuse to continue what another policy wrote, conversations, or what partial rollout continues itself.

    Args:
        rows: What `generate` was given.
        node: Which generates.
        policy: With which.
        writers: The policies of each node that generates.
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
