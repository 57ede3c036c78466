"""Rows that a reward failed on: noted where they were scored, told of by a node of the framework, and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.controller.in_step import InStep
from rlflow.dag.failures import MASK
from rlflow.dag.node import Node
from rlflow.rewards.reward import Scores
from rlflow.values.each import Each
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.path import RowPath

Failures = dict[tuple[int, ...], int]  # by the path of a row: MASK or SKIP


def note_failures(found: Failures, scores: Scores, scored: Any) -> None:
    """Add to `found` the rows of `scored` that these scores leave out."""
    if not scores.dropped:
        return
    paths = on_host(_path(scored).numbers).tolist()
    for row in scores.dropped:
        found[tuple(paths[row])] = MASK


def failures_of_rows(found: Failures, own: Tensor, device: torch.device) -> Tensor:
    """`[B]` uint8: what is to be done with each row, for failures of the row, of one above it, or of one below it.

    Args:
        found: By path.
        own: `[B, depth]`, the paths of the rows, on the CPU.
        device: Where it is wanted.
    """
    told = torch.zeros(len(own), dtype=torch.uint8)
    for path, what in found.items():
        depth = min(len(path), own.shape[1])
        beside = (own[:, :depth] == torch.tensor(path[:depth])).all(dim=1)
        told[beside] = told[beside].clamp(min=what)
    return on_device(told, device)


def tell(node: Node, values: Mapping[str, Any], now: InStep) -> Tensor:
    """`[B]` uint8, the value of a node that tells of failures.

    Args:
        node: Whose `failures_of` is a scorer, or a node that tells of rows below, or of the same rows.
        values: That it reads.
        now: The step, where the scorer ran on this rank.
    """
    if node.failures_of in now.failures:
        return now.failures.pop(node.failures_of)
    below = values[node.failures_of]
    if isinstance(below, Each):
        return below.max()
    return torch.stack([values[name] for name in node.reads]).amax(dim=0)


def without_failed(mask: Tensor, failures: Sequence[Tensor]) -> Tensor:
    """What the loss counts, without the rows that a reward failed on.

    Args:
        mask: Bool, `[B]` or `[B, T]`.
        failures: `[B]` each, on the host.
    """
    if not any(bool(of.any()) for of in failures):
        return mask
    counts = torch.stack([of == 0 for of in failures]).all(dim=0)  # [B]
    host = on_host(mask) & counts.view(-1, *[1] * (mask.dim() - 1))
    return on_device(host, mask.device)


def _path(scored: Any) -> RowPath:
    return next(value for value in vars(scored).values() if isinstance(value, RowPath))
