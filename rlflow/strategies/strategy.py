"""The interface of strategies: load roles, run backward passes and updates, return weights and training state."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.errors import UserError
from rlflow.models.causal_lm import EMA, WithoutAdapters
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.packed import PackedModel
from rlflow.models.shards import Unit, divided, fill, write_index, write_shard, write_shard_later
from rlflow.models.weight_files import shard_name
from rlflow.models.weights import Weight, digest_of, in_buckets
from rlflow.storage.disk import Disk
from rlflow.storage.safetensors_files import StoredTensor, TensorRange, all_finite
from rlflow.storage.stored_role import StoredRole
from rlflow.strategies.role import Average, LossScale, Role, begun, is_taken, move
from rlflow.values.layout import Layout

if TYPE_CHECKING:
    from rlflow.strategies.processes import ManyProcesses, OneProcess

SAVE_BUCKET_BYTES = 64 * 2**20
FLOAT32_BYTES = 4
WEIGHT = "weight"
NO_CHECKPOINTS = (
    "take another, or set `trainer.save_every_n_steps` and `trainer.save_every_seconds` to null and resume no run"
)


class TrainingStrategy:
    """Trains the roles of this rank; `Fabric(strategy=...)` is given its `processes`.

    This base class is for a model in whole plain tensors. A subclass may wrap a role (`_wrap`), and may change how
    gradients are computed (`backward`) and applied (`_update`). A subclass that divides weights or states over ranks
    also says which part a rank holds (`_materialize`, `_part_of`, `_state_parts_of`) and how weights are gathered
    (`_gathered`, `_whole`). A method that takes a role's name is called by all ranks of the role and by no others, in
    the same order. A role is on all ranks, each with rows of its own, unless `form_groups` is given other layouts.

    A run calls `check_roles` before processes start, then `form_groups`, and `setup_role` for each role of the rank. An
    update of a role is `backward` for each micro-batch and then `step`; after it `weights` are sent to the engine.

    Attributes:
        processes: Fabric's strategy, which starts the ranks and knows the rank of this process.
        roles: The roles on this rank, by name.
        precisions: The dtypes in which it trains, by their names in a config: `{"bf16": torch.bfloat16, ...}`.
        otherwise: Advice for another precision, at the end of an error.
        dtype: Dtype of forward passes.
        forward_plan: Plan by which rows are split into micro-batches, before the settings of one role are added.
        float32_head: Whether logits are computed in float32.
        timeout: Time after which a collective that a rank does not join fails; None on one rank.
        stage: Stage of ZeRO, or the one that divides as much: 0 nothing, 1 optimizer states, 2 also gradients, 3 also
            weights. Gradients are then summed in float32. None if the strategy cannot divide anything.
        divides_weights: Whether no rank ever holds a whole model.
        divides_layers: Whether ranks may divide each layer, and compute with their parts: tensor parallelism.
        holds_masters: Whether trained weights are float32 and are rounded for forward passes. ZeRO instead has float32
            copies of its weights.
        can_offload: Whether `offload_optimizer` is a setting of the strategy.
        offload_optimizer: Whether the optimizer's states are in the CPU's memory.
        offload_param: Whether the weights are in the CPU's memory.
        reduce_bucket_size: Most elements of gradients that are reduced together, from ZeRO 1 on.
        max_live_parameters: Most elements of weights that are whole at one time at ZeRO 3; None for those of a layer.
        hpz_partition_size: Number of ranks that divide a second copy of the weights at ZeRO 3; None for no copy.
    """

    processes: OneProcess | ManyProcesses
    roles: dict[str, Role]
    precisions: Mapping[str, torch.dtype]
    otherwise: str
    dtype: torch.dtype
    forward_plan: ForwardPlan
    float32_head: bool
    timeout: timedelta | None = None
    stage: int | None = None
    divides_weights: bool = False
    divides_layers: bool = False
    holds_masters: bool = False
    can_offload: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False
    reduce_bucket_size: int = 0
    max_live_parameters: int | None = None
    hpz_partition_size: int | None = None
    _as_given: TrainingStrategy | None = None

    def as_given(self) -> TrainingStrategy:
        """This strategy; if a run has started it, a copy in its state before, since Fabric starts a strategy once."""
        return self if self._as_given is None else copy.deepcopy(self._as_given)

    def note_as_given(self) -> None:
        """Store a copy of this strategy before a run starts it, since it then holds the run's processes and roles."""
        self._as_given = copy.deepcopy(self)

    def _configure(
        self,
        processes: OneProcess | ManyProcesses,
        precision: str,
        forward_plan: ForwardPlan,
        float32_head: bool,
    ) -> None:
        self.use_precision(precision)
        if forward_plan.token_budget < 1:
            raise UserError(f"`token_budget` is {forward_plan.token_budget}; a micro-batch holds at least 1 token.")
        self.processes = processes
        self.forward_plan = forward_plan
        self.float32_head = float32_head
        self.roles = {}
        self._layouts: dict[str, Layout] = {}

    def use_precision(self, precision: str) -> None:
        """Train in a precision by its name in `precisions`, such as `bf16`.

        Raises:
            UserError: This strategy does not train in it.
        """
        if precision not in self.precisions:
            known = ", ".join(self.precisions)
            raise UserError(f"`precision` is {precision!r}; {type(self).__name__} trains in {known}; {self.otherwise}")
        self.dtype = self.precisions[precision]

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return self.processes.root_device

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Number of this rank among all ranks of the run."""
        return self.processes.global_rank

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of this machine."""
        return self.processes.local_rank

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.processes.barrier()

    def form_groups(self, layouts: Mapping[str, Layout]) -> None:
        """Set the layouts of roles; called once, before any role is set up, by all ranks of the job.

        Args:
            layouts: Layouts by role, the same on all ranks. Ranks that hold copies of a shard divide its sequences.
        """
        self._layouts = dict(layouts)

    def layout(self, name: str) -> Layout:
        """The layout of a role, loaded or not."""
        return self._layouts.get(name, Layout(tuple(range(self.world_size)), self.world_size))

    def divided_over(self, layout: Layout) -> int:
        """Number of a role's ranks that divide it; further ranks hold copies."""
        return len(layout.ranks)

    def holds(self, name: str) -> bool:
        """Whether the role is on this rank."""
        return self.global_rank in self.layout(name).ranks

    def leads(self, name: str) -> bool:
        """Whether this is the first rank of the role, which writes files that the role has once."""
        return self.global_rank == self.layout(name).ranks[0]

    def agree(self, name: str, count: int) -> int:
        """The largest `count` over the ranks of the role, such as their numbers of micro-batches."""
        return count

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """Refuse roles that this strategy cannot train, before processes start.

        Args:
            handles: Handles by role.
            layouts: Layouts by role; further names are ignored.

        Raises:
            UserError: A role cannot be trained.
        """

    def setup_role(self, name: str, handle: ModelHandle, path: Path, updates: int | None = None) -> None:
        """Load a model, wrap it, give it an optimizer if it is trained, and attach it to its handle.

        A view without adapters loads nothing: its owner's role was set up before.

        Args:
            name: The role.
            handle: The handle that the algorithm calls.
            path: A folder in Hugging Face form.
            updates: Number of updates in the whole run, for schedules that end; None if it is not known.

        Raises:
            UserError: The schedule needs `updates` and it is None, or the model cannot be loaded or does not score
                correctly.
        """
        if isinstance(handle, WithoutAdapters):
            handle.attach_to_owner()
            return
        settings = handle.optimizer
        if settings is not None and settings.schedule != "constant" and updates is None:
            raise UserError(
                f"`{name}` has the schedule `{settings.schedule}`, which ends with the run, and the number of updates "
                "of this run is not known. Set `trainer.max_steps`, or the schedule `constant`."
            )
        model = handle.load(path, self.dtype, self.root_device, empty=self.divides_weights)
        if self.divides_weights:
            self._materialize(name, model)
            fill(model, self._part_of, self._full_shape, self.root_device)
        trained = {weight.name: weight.parameter for weight in model.trained()}
        optimizer = None if settings is None else settings.made(handle.parameter_groups(model), trained)
        if self.float32_head:
            model.use_float32_head()
        scale = LossScale() if optimizer is not None and self.dtype == torch.float16 else None
        role = self.roles[name] = Role(handle, model, optimizer, updates, loss_scale=scale)
        forward = self._wrap(name, role)
        handle.attach(forward, self._plan_of(name))
        model.check(forward, self.root_device, handle.plan.shares_prefixes, handle.plan.peers)
        if handle.lora is not None:
            without_adapters = [Weight(weight.name, weight.parameter) for weight in model.weights()]
            buckets = self._full(without_adapters, SAVE_BUCKET_BYTES)
            model.base_digest = digest_of(each for bucket in buckets for each in bucket)
        if isinstance(handle, EMA) and handle.owner.trainable:
            role.average = self._average_of(role, handle)

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient to the role's gradients.

        Args:
            name: A trained role.
            loss: 0-dim, this shard's share of the global loss. It is already divided by the denominator of the whole
                update, so that the losses of all shards and micro-batches add up to the loss of the update. Ranks that
                hold copies of a shard all pass the same loss.
            last: Whether this is the update's last micro-batch.
        """
        (loss * self.roles[name].scaled_by).backward()

    def step(self, name: str, most: float = math.inf) -> float:
        """Make an update: set the learning rate, clip the gradients, update the weights, and clear the gradients.

        Args:
            name: The role.
            most: The largest norm of a gradient that is used.

        Returns:
            The norm of the whole gradient before clipping, the same on every rank of the role. If it is not finite or
            above `most`, no rank has changed anything.
        """
        role = self.roles[name]
        assert role.optimizer is not None, name
        role.set_learning_rates()
        norm = self._update(name, role, most)
        if is_taken(norm, most):
            role.done += 1
        if role.loss_scale is not None:
            role.loss_scale.update(math.isfinite(norm))
        return norm

    def weights(self, name: str, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The role's full weights by Hugging Face name, as forward passes use them, in buckets.

        Tied weights come once, and adapters are merged. A bucket's tensors may be views that are valid only until the
        next bucket is taken. Every rank of the role iterates to the end.

        Args:
            name: The role.
            bucket_bytes: Most bytes of a bucket, unless it has one larger tensor.
        """
        yield from self._full(self.roles[name].model.weights(), bucket_bytes)

    def gradients(self, name: str) -> dict[str, Tensor]:
        """The full gradient of every trained weight by name, after the last `backward` and before `step`."""
        role = self.roles[name]
        found = {weight.name: self._gradient(weight.parameter) for weight in role.model.trained()}
        if role.loss_scale is None:
            return found
        return {key: gradient.float() / role.scaled_by for key, gradient in found.items()}

    def save(
        self,
        name: str,
        folder: Path,
        disk: Disk,
        state: Callable[[], StoredRole] | None = None,
        what: str | None = None,
    ) -> tuple[Path, ...]:
        """Write the role's model in Hugging Face form; for a model with adapters, only these, in peft's form.

        Every rank of the role calls it. Weights are gathered bucket by bucket, and each rank writes its share of them
        to a file of its own. The role's first rank writes the other files, and adapters. If `state` has all weights,
        nothing is gathered or copied: the disk reads the weights from there.

        Args:
            name: The role.
            folder: Folder to write to; it exists.
            disk: Disk that writes. The model is complete when the disk's `wait` has returned on every rank.
            state: Returns the role's present state in a checkpoint that is being written; called by the disk. None if
                there is none.
            what: Name of the model in the error that a weight is infinite or NaN; None for the folder's name.

        Returns:
            This rank's file of weights, if it has one.

        Raises:
            UserError: Raised by the disk: a weight is infinite or NaN.
        """
        model, ranks, what = self.roles[name].model, self.layout(name).ranks, what or folder.stem
        weights = model.saved()
        if model.lora is not None:
            adapters: dict[str, Tensor] = {}
            for bucket in self._full(weights, SAVE_BUCKET_BYTES):
                if self.leads(name):
                    adapters |= {key: weight.to("cpu", copy=True) for key, weight in bucket}
            if self.leads(name):
                disk.do(partial(_save_adapter, model, name, folder, adapters, what))
            return ()
        empty = {weight.name: self._empty_whole(weight.parameter) for weight in weights}
        units = divided(model, empty, len(ranks))
        shards, number = 1 + max(unit.shard for unit in units), ranks.index(self.global_rank)
        path, own = folder / shard_name(number, shards), [unit for unit in units if unit.shard == number]
        if state is None or empty.keys() != {weight.name for weight in model.trained()}:
            passing = chain.from_iterable(self._full(weights, SAVE_BUCKET_BYTES))
            write_shard(path, name, model, own, passing, disk, what)
        else:
            write_shard_later(path, name, model, own, _read(state, own, empty), disk, what)
        if self.leads(name):
            disk.do(partial(model.save_config, folder))
            if shards > 1:
                disk.do(partial(write_index, folder, units, shards))
        return (path,) if own else ()

    def model_bytes(self, name: str) -> int:
        """Bytes that `save` writes."""
        return sum(self._empty_whole(weight.parameter).nbytes for weight in self.roles[name].model.saved())

    def state_parts(self, name: str) -> Iterator[tuple[str, torch.Size, dict[str, TensorRange]]]:
        """Each trained parameter: its name, its full shape, and this rank's parts of its training state.

        The state is the float32 weight and the optimizer's tensors, such as `exp_avg`. Nothing is gathered. Over all
        ranks of the role, each element is in exactly one part. Parts are views; copy them before the next update.
        """
        if (average := self.roles[name].average) is not None:
            for key, part in average.held(self._part_of):
                copies = self._copies(name, average.weights[key])
                yield key, self._full_shape(average.weights[key]), {WEIGHT: _share_of(part, *copies)}
            return
        kinds = self.roles[name].kinds
        for weight in self.roles[name].model.trained():
            held = self._state_parts_of(name, weight.parameter, kinds)
            copies = self._copies(name, weight.parameter)
            shares = {kind: _share_of(part, *copies) for kind, part in held.items()}
            yield weight.name, self._full_shape(weight.parameter), shares

    def load_state_parts(
        self, name: str, stored: StoredRole, updates_done: int, loss_scale: tuple[float, int] | None = None
    ) -> None:
        """Restore a state that `state_parts` returned, on any number of ranks and under any strategy.

        Every rank of the role calls it, and reads only the ranges that it holds.

        Args:
            name: A trained role.
            stored: Stored weights by Hugging Face name.
            updates_done: Number of updates when the state was taken.
            loss_scale: `LossScale.record` when the state was taken; used only by a role in float16.

        Raises:
            UserError: The state is of another model, or the optimizer has other tensors than those stored.
        """
        role = self.roles[name]
        if (average := role.average) is not None:
            stored.require({key: self._full_shape(own) for key, own in average.weights.items()}, [WEIGHT])
            for key, part in average.held(self._part_of):
                part.values.copy_(part.cut(partial(stored.read, key, WEIGHT)))
            self._renew_average(name)
            role.done = updates_done
            return
        trained = role.model.trained()
        _kinds_kept(role, self.root_device)  # refuses what was saved after a signal in a run without other checkpoints
        if updates_done:  # before its first update an optimizer has no tensors
            self._make_optimizer_state(name, role)
        kinds = role.kinds
        needed = [WEIGHT, *kinds] if updates_done else None  # a checkpoint of an earlier version may have more
        stored.require({weight.name: self._full_shape(weight.parameter) for weight in trained}, needed)
        for weight in trained:
            self._set_state_parts(name, weight.parameter, kinds, partial(stored.read, weight.name))
        self._renew_copies(name)
        assert role.optimizer is not None
        for state in role.optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor):
                step.fill_(updates_done)
            elif step is not None:
                state["step"] = updates_done
        role.done = updates_done
        if role.loss_scale is not None and loss_scale is not None:
            role.loss_scale = LossScale(*loss_scale)

    def state_bytes(self, name: str) -> int:
        """Bytes of `state_parts` on all ranks together, also of a role that is an average.

        Raises:
            UserError: A checkpoint cannot store the tensors of the role's optimizer.
        """
        average = self.roles[name].average
        trained = [weight.parameter for weight in self.roles[name].model.trained()]
        width = max(FLOAT32_BYTES, self.dtype.itemsize)
        if average is not None:
            return sum(self._full_shape(parameter).numel() for parameter in average.weights.values()) * width
        kinds = 1 + _kinds_kept(self.roles[name], self.root_device)
        return sum(self._full_shape(parameter).numel() for parameter in trained) * width * kinds

    def move_average(self, name: str) -> None:
        """Update a role that is a moving average of another by one step; called by all ranks of the role."""
        role = self.roles[name]
        average = role.average
        assert average is not None, name
        for weight in self.roles[average.owner].model.trained():
            part = average.parts.get(weight.name)
            if part is None:  # the model's own weights are wide enough
                move(self._part_of(average.weights[weight.name]), self._part_of(weight.parameter), average.decay)
            else:
                move(part, self._state_parts_of(average.owner, weight.parameter, [])[WEIGHT], average.decay)
        self._renew_average(name)
        role.done += 1

    def _materialize(self, name: str, model: PackedModel) -> None:
        """Allocate this rank's part of each parameter; parameters are on the device `meta` before.

        Tied parameters stay tied. Buffers may be replaced, since they are set afterwards. Called by all ranks of the
        role, only if weights are divided.
        """
        raise NotImplementedError

    def _wrap(self, name: str, role: Role) -> torch.nn.Module:
        """The module that the handle calls for a forward pass."""
        return role.model

    def _plan_of(self, name: str) -> ForwardPlan:
        return self.forward_plan

    def _update(self, name: str, role: Role, most: float) -> float:
        """Apply the gradients, unless their norm is above `most`; returns the norm as `step` does."""
        return role.clip_and_step(most)

    def _full(self, weights: list[Weight], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """The values of `weights`, gathered bucket by bucket."""
        for bucket in in_buckets(weights, lambda weight: self._empty_whole(weight.parameter).nbytes, bucket_bytes):
            with self._gathered([parameter for weight in bucket for parameter in weight.parameters]):
                yield [(weight.name, weight.value(self._whole)) for weight in bucket]

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext()

    def _whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """The full tensor of a gathered parameter, as forward passes use it."""
        return parameter.detach()

    def _empty_whole(self, parameter: torch.nn.Parameter) -> Tensor:
        """A tensor of the shape and dtype of `_whole`, on the device `meta`."""
        return torch.empty(self._full_shape(parameter), dtype=parameter.dtype, device="meta")

    def _full_shape(self, parameter: torch.nn.Parameter) -> torch.Size:
        return parameter.shape

    def _part_of(self, parameter: Tensor) -> TensorRange:
        """This rank's part of a parameter that forward passes read, or of a tensor that is divided like it."""
        return TensorRange(0, parameter.detach().view(-1))

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def _copies(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """This rank's place among the ranks that hold the same part of a parameter's state, and their number."""
        return 0, 1

    def _average_of(self, role: Role, handle: EMA) -> Average:
        """An average before its first move: the weights from which the owner starts."""
        owner = next(name for name, other in self.roles.items() if other.handle is handle.owner)
        trained = self.roles[owner].model.trained()
        own = {weight.name: weight.parameter for weight in role.model.weights()}
        average = Average(owner, handle.decay, {weight.name: own[weight.name] for weight in trained})
        if self.dtype.itemsize < FLOAT32_BYTES and not self.holds_masters:
            for weight in trained:
                wide = self._state_parts_of(owner, weight.parameter, [])[WEIGHT]
                average.parts[weight.name] = begun(wide, self._part_of(own[weight.name]))
        return average

    def _renew_average(self, name: str) -> None:
        """Copy the average to the weights that forward passes read, if these are not the average itself.

        Called by all ranks of the role.
        """
        average = self.roles[name].average
        assert average is not None, name
        for key, part in average.parts.items():
            self._part_of(average.weights[key]).values.copy_(part.values)

    def _make_optimizer_state(self, name: str, role: Role) -> None:
        """Make an update of length 0: at a first update optimizers make their state, and DeepSpeed its maps of it."""
        with role.handle.training():
            loss = role.handle.score_nothing()
        self.backward(name, loss, last=True)
        with role.standing_still():
            self._update(name, role, math.inf)

    def _state_parts_of(self, name: str, parameter: torch.nn.Parameter, kinds: list[str]) -> dict[str, TensorRange]:
        """This rank's parts of a parameter's float32 `weight`, and of the optimizer's tensors named in `kinds`."""
        optimizer = self.roles[name].optimizer
        assert optimizer is not None
        held: dict[str, Tensor] = {WEIGHT: parameter} | {kind: optimizer.state[parameter][kind] for kind in kinds}
        return {kind: self._part_of(tensor) for kind, tensor in held.items()}

    @torch.no_grad()
    def _set_state_parts(
        self, name: str, parameter: torch.nn.Parameter, kinds: list[str], read: Callable[[str, int, int], Tensor]
    ) -> None:
        """Set the parts that `_state_parts_of` returns to the values of `read(kind, start, length)`."""
        for kind, part in self._state_parts_of(name, parameter, kinds).items():
            part.values.copy_(part.cut(partial(read, kind)))

    def _renew_copies(self, name: str) -> None:
        """Copy the weights that were set to those that forward passes read, if these are copies; called by all."""


def _read(
    state: Callable[[], StoredRole], units: Iterable[Unit], empty: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of `units` as forward passes read them, rounded from the float32 weights of a stored state."""
    stored, names = state(), {name for unit in units for name in unit.names}
    for name, whole in empty.items():
        if name in names:
            yield name, stored.read(name, WEIGHT, 0, whole.numel()).view(whole.shape).to(whole.dtype)


def _save_adapter(model: PackedModel, role: str, folder: Path, adapters: dict[str, Tensor], what: str) -> None:
    entries = [StoredTensor.of(name, tensor) for name, tensor in adapters.items()]
    deque(all_finite(what, role, entries, adapters.values()), maxlen=0)
    model.save_adapter(folder, adapters)


def _kinds_kept(role: Role, device: torch.device) -> int:
    """Number of the optimizer's tensors for each weight; before its first update, measured on a small weight."""
    if kinds := role.kinds:
        return len(kinds)
    optimizer = role.settings.small(device)
    (weight,) = optimizer.param_groups[0]["params"]
    before = _options(optimizer)
    optimizer.step()
    if moved := [name for name, value in _options(optimizer).items() if before.get(name) != value]:
        raise UserError(
            f"`optimizer.name` is {role.settings.name!r}, whose step changes `{moved[0]}` of its groups, and a"
            f" checkpoint does not hold that; {NO_CHECKPOINTS}"
        )
    kept = {kind: value for kind, value in optimizer.state[weight].items() if kind != "step" and value is not None}
    for kind, value in kept.items():
        if not isinstance(value, Tensor) or value.shape != weight.shape:
            raise UserError(
                f"`optimizer.name` is {role.settings.name!r}, which keeps `{kind}` of a weight in another shape than"
                f" its own, and a checkpoint cannot hold that; {NO_CHECKPOINTS}"
            )
    return len(kept)


def _options(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options of the optimizer's first group as text, which stays as it is when a step changes them in place."""
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return {name: repr(each.tolist() if isinstance(each, Tensor) else each) for name, each in options.items()}


def _share_of(part: TensorRange, place: int, count: int) -> TensorRange:
    """The share of one of `count` ranks that hold the same part; shares are nearly even.

    With 10 elements and 3 ranks, place 0 has elements 0 to 2, place 1 elements 3 to 5, place 2 the rest.
    """
    if count == 1:
        return part
    assert not part.width, part
    length = part.values.numel()
    first, end = place * length // count, (place + 1) * length // count
    return TensorRange(part.start + first, part.values[first:end])
