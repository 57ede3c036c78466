"""What a node has generated from, in one run of it: seeds, loss masks and metrics follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlflow.rollout.sampling import Earlier
from rlflow.values.host_copy import on_device, on_host
from rlflow.values.rollout import Rollout

Path = tuple[int, ...]  # of a row


@dataclass
class Calls:
    """The calls of `generate` that a node has made.

    Attributes:
        tokens: That were sampled in them.
    """

    tokens: int = 0
    _count: Counter[Path] = field(default_factory=Counter)
    _children: Counter[Path] = field(default_factory=Counter)
    _inherited: dict[Path, int] = field(default_factory=dict)  # of each row that was made

    def before(self, parents: Sequence[Path]) -> Earlier:
        """What was made of rows of these paths so far."""
        of_rows = [(self._count[row], self._children[row]) for row in parents]
        return Earlier(*torch.tensor(of_rows, dtype=torch.int64).view(-1, 2).unbind(dim=1))

    def add(self, parents: Sequence[Path], made: Rollout) -> None:
        """Note a call.

        Args:
            parents: The paths of the rows that were answered or continued.
            made: Their children, on the CPU.
        """
        self._count.update(parents)
        self.tokens += _sampled(made)
        paths = [tuple(path) for path in made.path.numbers.tolist()]
        self._children.update(path[:-1] for path in paths)
        self._inherited |= zip(paths, made.inherited.tolist(), strict=True)

    def returned(self, rollout: Rollout, depth: int) -> Rollout:
        """What a node returns, each token in the loss mask of one row: the first, by paths, of those that share it.

        What came with a row that the node read is inherited, and nothing else: a row may continue one that the node
        made itself, and nobody else sees that one.

        Args:
            rollout: Some of the rows that the node made, in any order.
            depth: Of the paths of what the node reads.
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
    """The tokens that a policy was asked for: not those that were inherited, nor what environments wrote."""
    return int((made.policy_lengths - made.inherited).sum())
