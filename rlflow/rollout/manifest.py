"""What a weight sync sends and what the engine then holds, compared by fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.models.fingerprint import fingerprint

NAMED = 8  # tensors listed in an error


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that it should."""


@dataclass(frozen=True)
class Piece:
    """A slice of a tensor of the trainer, and where this rank's engine holds it.

    Attributes:
        name: The trainer's (Hugging Face) name.
        place: The engine's name; one of its parameters may hold pieces of several tensors.
        length: Of the slice.
        dim: Along which the slice is cut, of both.
        start: Of the slice in the trainer's tensor.
        row: Of the slice in the engine's parameter.
    """

    name: str
    place: str
    length: int
    dim: int = 0
    start: int = 0
    row: int = 0

    def sent(self, tensor: Tensor) -> Tensor:
        """The slice of the trainer's `tensor`."""
        return tensor.narrow(self.dim, self.start, self.length)

    def held(self, parameter: Tensor) -> Tensor:
        """The slice in the engine's `parameter`."""
        return parameter.narrow(self.dim, self.row, self.length)


class Manifest:
    """Fingerprints of one sync's tensors, taken while they pass by.

    Args:
        pieces: All that the engine holds.
        dtype: Of the engine.
    """

    def __init__(self, pieces: Sequence[Piece], dtype: torch.dtype) -> None:
        self.tensors = 0
        self.nbytes = 0
        self._dtype = dtype
        self._sent: dict[Piece, Tensor] = {}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def watch(self, buckets: Iterable[list[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on in the engine's dtype, one by one.

        Raises:
            WeightSyncError: The engine has no such tensor.
        """
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in self._pieces:
                    raise WeightSyncError(f"the trainer sends `{name}`, which the engine does not have")
                cast = tensor.detach().to(self._dtype)
                for piece in self._pieces[name]:
                    self._sent[piece] = fingerprint(piece.sent(cast))
                self.tensors += 1
                self.nbytes += cast.nbytes
                yield name, cast

    def check(self, held: Iterable[tuple[Piece, Tensor]]) -> None:
        """Compare what the engine holds with what was sent, all of it in one transfer to the host.

        Raises:
            WeightSyncError: Names every tensor that was not sent or is held with other values.
        """
        unsent = [name for name, (piece, *_) in self._pieces.items() if piece not in self._sent]
        now = {piece: fingerprint(tensor) for piece, tensor in held if piece in self._sent}
        changes = _differ([self._sent[piece] for piece in now], [*now.values()])
        changed = [f"{piece.name} (in {piece.place})" for piece, change in zip(now, changes, strict=True) if change]
        problems = [
            f"{words}: {_some(names)}" for words, names in (("not sent", unsent), ("held otherwise", changed)) if names
        ]
        if problems:
            raise WeightSyncError(f"the engine does not hold the trainer's weights. {'; '.join(problems)}")


def _differ(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """Which fingerprints are other ones."""
    if not left:
        return []
    one, other = (torch.stack([each.to(left[0].device) for each in side]) for side in (left, right))
    differ: list[bool] = (one != other).tolist()
    return differ


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
