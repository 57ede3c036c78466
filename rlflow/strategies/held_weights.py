"""Weights as the ranks of a role hold them: gathered for the engine and for files, a rank's part of them, gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rlflow.models.lora import Weight
from rlflow.models.packed import PackedModel
from rlflow.models.shards import Unit, divided, write_index, write_shard, write_shard_later
from rlflow.models.tensor_range import TensorRange
from rlflow.models.weight_files import shard_name
from rlflow.storage.disk import Disk
from rlflow.storage.tensors import StoredTensor, all_finite
from rlflow.strategies.roles import RankRoles
from rlflow.strategies.state import WEIGHT, StoredState

SAVE_BUCKET_BYTES = 64 * 2**20


class HeldWeights(RankRoles):
    """Hands out a role's weights whole; a subclass that divides them says how they are gathered and what a rank has."""

    def weights(self, name: str, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The role's weights as its forward uses them, full, by Hugging Face name, in buckets.

        Tied weights come once, adapters merged into theirs. A bucket's tensors are views that hold until the next
        bucket is asked for, or new ones. Every rank of the role iterates to the end.

        Args:
            name: The role.
            bucket_bytes: A bucket holds at most this, or one larger tensor.
        """
        yield from self._full(self._roles[name].model.weights(), bucket_bytes)

    def gradients(self, name: str) -> dict[str, Tensor]:
        """The full gradient of every trained weight by name, after the last `backward` and before `step`."""
        role = self._roles[name]
        found = {weight.name: self._gradient(weight.parameter) for weight in role.model.trained()}
        if role.loss_scale is None:
            return found
        return {key: gradient.float() / role.scaled_by for key, gradient in found.items()}

    def save(
        self,
        name: str,
        folder: Path,
        disk: Disk,
        state: Callable[[], StoredState] | None = None,
        what: str | None = None,
    ) -> tuple[Path, ...]:
        """Write the role's model in Hugging Face form, of a model with adapters only these, in peft's.

        Every rank of the role calls it. Weights are gathered bucket by bucket, and each rank writes its share of them
        to a file of its own; the role's first rank writes the rest, and adapters. Where `state` has them all, nothing
        is gathered or copied: the disk reads them there.

        Args:
            name: The role.
            folder: Where to write; it is there.
            disk: Writes. All is there when its `wait` returns on every rank.
            state: Gives the role's state of now; the disk asks for it. None where it is not stored.
            what: The model is called where a weight is infinite or NaN; None for the folder's name.

        Returns:
            This rank's file of weights, if it has one.

        Raises:
            UserError: By the disk: a weight is infinite or NaN.
        """
        model, ranks = self._roles[name].model, self.layout(name).ranks
        weights = model.saved()
        if model.lora is not None:
            adapters: dict[str, Tensor] = {}
            for bucket in self._full(weights, SAVE_BUCKET_BYTES):
                if self.leads(name):
                    adapters |= {key: weight.to("cpu", copy=True) for key, weight in bucket}
            if self.leads(name):
                disk.do(partial(_save_adapter, model, name, folder, adapters, what or folder.stem))
            return ()
        empty = {weight.name: self._empty_whole(weight.parameter) for weight in weights}
        units = divided(model, empty, len(ranks))
        shards, number = 1 + max(unit.shard for unit in units), ranks.index(self.global_rank)
        path, own = folder / shard_name(number, shards), [unit for unit in units if unit.shard == number]
        if state is None or empty.keys() != {weight.name for weight in model.trained()}:
            passing = chain.from_iterable(self._full(weights, SAVE_BUCKET_BYTES))
            written = write_shard(path, name, model, own, passing, disk, what)
        else:
            written = write_shard_later(path, name, model, own, _read(state, own, empty), disk, what)
        if self.leads(name):
            disk.do(partial(model.save_config, folder))
            if shards > 1:
                disk.do(partial(write_index, folder, units, shards))
        return written

    def model_bytes(self, name: str) -> int:
        """Of what `save` writes."""
        return sum(self._empty_whole(weight.parameter).nbytes for weight in self._roles[name].model.saved())

    def _full(self, weights: list[Weight], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The values of `weights`, gathered bucket by bucket."""
        for bucket in self._buckets(weights, bucket_bytes):
            with self._gathered([parameter for weight in bucket for parameter in weight.parameters]):
                yield [(weight.name, weight.value(self._whole)) for weight in bucket]

    def _buckets(self, weights: list[Weight], limit: int) -> Iterator[list[Weight]]:
        bucket: list[Weight] = []
        filled = 0
        for weight in weights:
            size = self._empty_whole(weight.parameter).nbytes
            if bucket and filled + size > limit:
                yield bucket
                bucket, filled = [], 0
            bucket.append(weight)
            filled += size
        if bucket:
            yield bucket

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def _whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """The full tensor that the forward computes with, of a gathered parameter."""
        return parameter.detach()

    def _empty_whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """On the device `meta`, a tensor of the shape and dtype of `_whole`."""
        return torch.empty(self._full_shape(parameter), dtype=parameter.dtype, device="meta")

    def _full_shape(self, parameter: torch.nn.Parameter) -> torch.Size:
        return parameter.shape

    def _part_of(self, parameter: Tensor) -> TensorRange:
        """What this rank holds of a parameter that forward passes read, or of a tensor that lies as it does."""
        return TensorRange(0, parameter.detach().view(-1))

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def _copies(self, name: str) -> tuple[int, int]:
        """This rank's place among those that hold the same parts of the role's state, and how many they are."""
        return 0, 1


def _read(
    state: Callable[[], StoredState], units: Iterable[Unit], empty: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of `units`, as forward passes read them, from the state that they are rounded from."""
    stored, names = state(), {name for unit in units for name in unit.names}
    for name, whole in empty.items():
        if name in names:
            yield name, stored.read(name, WEIGHT, 0, whole.numel()).view(whole.shape).to(whole.dtype)


def _save_adapter(model: PackedModel, role: str, folder: Path, adapters: dict[str, Tensor], what: str) -> None:
    entries = [StoredTensor.of(name, tensor) for name, tensor in adapters.items()]
    deque(all_finite(what, role, entries, adapters.values()), maxlen=0)
    model.save_adapter(folder, adapters)
