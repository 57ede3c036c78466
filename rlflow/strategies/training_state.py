"""What training keeps of a role beside the weights that forward passes read: for checkpoints, and of averages."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.causal_lm import Averaged
from rlflow.models.tensor_range import TensorRange
from rlflow.strategies.average import Average, averaged_parts, begun, move
from rlflow.strategies.held_weights import HeldWeights
from rlflow.strategies.loss_scale import LossScale
from rlflow.strategies.roles import Role
from rlflow.strategies.state import WEIGHT, StoredState, share_of

FLOAT32_BYTES = 4


class TrainingState(HeldWeights):
    """Float32 weights and what optimizers keep of them, in the parts that a rank holds, and moving averages."""

    dtype: torch.dtype
    holds_masters: bool = False  # trained weights are float32, rounded for forward passes; ZeRO has a copy beside

    def state_parts(self, name: str) -> Iterator[tuple[str, torch.Size, dict[str, TensorRange]]]:
        """Each trained parameter by name: its full shape, and this rank's part of its float32 weight and of the rest.

        The rest is what the optimizer keeps of it, such as `exp_avg`. Nothing is gathered. The parts of the role's
        ranks together are each element once; views, to be copied before the next update.
        """
        place, count = self._copies(name)
        if (average := self._roles[name].average) is not None:
            for key, part in averaged_parts(average, self._part_of):
                yield key, self._full_shape(average.weights[key]), {WEIGHT: share_of(part, place, count)}
            return
        kinds = _kept_by(self._roles[name])
        for weight in self._roles[name].model.trained():
            held = self._state_parts_of(name, weight.parameter, kinds)
            shares = {kind: share_of(part, place, count) for kind, part in held.items()}
            yield weight.name, self._full_shape(weight.parameter), shares

    def untrained_record(self, name: str) -> dict[str, Any]:
        """What the state belongs to and does not hold, to be compared when training goes on."""
        return self._roles[name].model.untrained_record()

    def load_state_parts(
        self, name: str, stored: StoredState, updates_done: int, loss_scale: tuple[float, int] | None = None
    ) -> None:
        """Go on from a state that `state_parts` gave, on any number of ranks and by any strategy.

        Every rank of the role calls it, and reads only the ranges that it holds.

        Args:
            name: A trained role.
            stored: By Hugging Face name.
            updates_done: When it was taken.
            loss_scale: `LossScale.record` when it was taken, of a role in float16; another role has no use for it.

        Raises:
            UserError: It is of another model, or the optimizer keeps other things than those stored.
        """
        role = self._roles[name]
        if (average := role.average) is not None:
            stored.require({key: self._full_shape(own) for key, own in average.weights.items()}, [WEIGHT])
            for key, part in averaged_parts(average, self._part_of):
                part.values.copy_(stored.read(key, WEIGHT, part.start, part.values.numel()))
            self._renew_average(name)
            role.done = updates_done
            return
        trained = role.model.trained()
        self._make_optimizer_state(name, role)
        # Before its first update an optimizer keeps nothing, and its state is what an update of length 0 leaves.
        kinds = [kind for kind in _kept_by(role) if updates_done or kind in stored.kinds]
        stored.require({weight.name: self._full_shape(weight.parameter) for weight in trained}, [WEIGHT, *kinds])
        for weight in trained:
            self._set_state_parts(name, weight.parameter, kinds, partial(stored.read, weight.name))
        self._renew_copies(name)
        assert role.optimizer is not None
        for state in role.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(updates_done)
        role.done = updates_done
        if role.loss_scale is not None and loss_scale is not None:
            role.loss_scale = LossScale(*loss_scale)

    def state_bytes(self, name: str) -> int:
        """Of `state_parts`, of all ranks together; also of a role that is an average.

        Raises:
            UserError: What the role's optimizer keeps cannot be in a checkpoint.
        """
        average = self._roles[name].average
        trained = [weight.parameter for weight in self._roles[name].model.trained()]
        width = max(FLOAT32_BYTES, self.dtype.itemsize)
        if average is not None:
            return sum(self._full_shape(parameter).numel() for parameter in average.weights.values()) * width
        kinds = 1 + _kinds_kept(self._roles[name], self.root_device)
        return sum(self._full_shape(parameter).numel() for parameter in trained) * width * kinds

    def move_average(self, name: str) -> None:
        """Move a role that is another's average by one step; called by all its ranks."""
        role = self._roles[name]
        average = role.average
        assert average is not None, name
        for weight in self._roles[average.owner].model.trained():
            part = average.parts.get(weight.name)
            if part is None:  # the model's own weights are wide enough
                move(self._part_of(average.weights[weight.name]), self._part_of(weight.parameter), average.decay)
            else:
                move(part, self._state_parts_of(average.owner, weight.parameter, [])[WEIGHT], average.decay)
        self._renew_average(name)
        role.done += 1

    def _average_of(self, role: Role, handle: Averaged) -> Average:
        """An average that has not moved: the weights that the owner starts from."""
        owner = next(name for name, other in self._roles.items() if other.handle is handle.owner)
        trained = self._roles[owner].model.trained()
        own = {weight.name: weight.parameter for weight in role.model.weights()}
        average = Average(owner, handle.decay, {weight.name: own[weight.name] for weight in trained})
        if self.dtype.itemsize < FLOAT32_BYTES and not self.holds_masters:
            for weight in trained:
                wide = self._state_parts_of(owner, weight.parameter, [])[WEIGHT]
                average.parts[weight.name] = begun(wide, self._part_of(own[weight.name]))
        return average

    def _renew_average(self, name: str) -> None:
        """Let forward passes read the average where they read copies of it; called by all ranks of the role."""
        average = self._roles[name].average
        assert average is not None, name
        for key, part in average.parts.items():
            self._part_of(average.weights[key]).values.copy_(part.values)

    def _make_optimizer_state(self, name: str, role: Role) -> None:
        """An update of length 0: optimizers make their state, and DeepSpeed its maps of it, at the first one."""
        assert role.optimizer is not None
        with role.handle.training():
            loss = role.handle.score_nothing()
        self.backward(name, loss, last=True)
        for group in role.optimizer.param_groups:
            group["lr"] = 0.0
        self._update(name, role, math.inf)

    def _state_parts_of(self, name: str, parameter: torch.nn.Parameter, kinds: list[str]) -> dict[str, TensorRange]:
        """All that this rank holds of a parameter's float32 `weight`, and of the `kinds` that the optimizer keeps."""
        optimizer = self._roles[name].optimizer
        assert optimizer is not None
        held: dict[str, Tensor] = {WEIGHT: parameter} | {kind: optimizer.state[parameter][kind] for kind in kinds}
        return {kind: self._part_of(tensor) for kind, tensor in held.items()}

    @torch.no_grad()
    def _set_state_parts(
        self, name: str, parameter: torch.nn.Parameter, kinds: list[str], read: Callable[[str, int, int], Tensor]
    ) -> None:
        """Read, by `read(kind, start, length)`, what `_state_parts_of` gives."""
        for kind, part in self._state_parts_of(name, parameter, kinds).items():
            part.values.copy_(read(kind, part.start, part.values.numel()))

    def _renew_copies(self, name: str) -> None:
        """Let forward passes read the weights that were set, where these are copies of them; called by all ranks."""

    @abstractmethod
    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient to the role's.

        Args:
            name: A trained role.
            loss: This shard's share of the global loss: already divided by what the whole update divides by, so that
                the losses of all shards and micro-batches add up to the loss of the update. 0-dim. The ranks that
                hold copies of a shard all give the same.
            last: Whether this is the update's last micro-batch.
        """

    @abstractmethod
    def _update(self, name: str, role: Role, most: float) -> float:
        """Apply the gradients, unless their norm is above `most`; `step` says what of them is returned."""


def _kept_by(role: Role) -> list[str]:
    """What the optimizer keeps of each weight, tensors of its shape, such as `exp_avg`; nothing before an update."""
    assert role.optimizer is not None
    kept: dict[str, object] = next(iter(role.optimizer.state.values()), {})
    return sorted(kind for kind, value in kept.items() if isinstance(value, Tensor) and value.dim() > 0)


def _kinds_kept(role: Role, device: torch.device) -> int:
    """How many tensors of a weight's shape the optimizer keeps; before its first update, as it does of a small one."""
    if kinds := _kept_by(role):
        return len(kinds)
    weight = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    weight.grad = torch.zeros_like(weight)
    optimizer = role.settings.kind([weight], **role.settings.keywords)
    optimizer.step()
    kept = {kind: value for kind, value in optimizer.state[weight].items() if kind != "step" and value is not None}
    for kind, value in kept.items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            raise UserError(
                f"`optimizer.name` is {role.settings.name!r}, which keeps `{kind}` of a weight in another shape than"
                " its own, and a checkpoint cannot hold that; take another, or set `trainer.save_every_n_steps` to null"
            )
    return len(kept)
