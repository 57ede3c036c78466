"""Torch's FSDP2: each role's weights, gradients and optimizer states are divided over the role's ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlflow.errors import UserError
from rlflow.models.expert_parallel import divide_experts
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.packed import PackedModel
from rlflow.models.tensor_parallel import divide_layers
from rlflow.storage.safetensors_files import TensorRange
from rlflow.strategies.distributed import TIMEOUT_S, DistributedStrategy, replace_parameters
from rlflow.strategies.role import Role
from rlflow.values.layout import Layout


class FSDPStrategy(DistributedStrategy):
    """Data-parallel training with `fully_shard`. At every number of ranks, gradients are those of the global loss.

    Each parameter is sharded by rows: 10 rows on 4 ranks are 3, 3, 3 and 1. A layer's weights are gathered before the
    layer computes, and freed after it. This strategy needs only torch. With `tensor_parallel_size` of a placement,
    consecutive ranks divide each layer; the ranks that have the same part of a layer shard this part.

    A config for machines of 8 GPUs. Each machine holds a whole copy, so weights are gathered within a machine:

        strategy:
          class_path: fsdp
          init_args: {precision: bf16, hsdp_shard_size: 8}

    Args:
        precision: Precision of forward passes. With `bf16` and `fp16`, weights are stored in float32 and rounded when a
            layer is gathered, and gradients are summed in float32. `fp16` scales the loss, and skips updates whose
            gradient overflows.
        token_budget: Maximum number of tokens in a micro-batch. A longer sequence gets its own micro-batch.
        packing: Run forward passes without padding. If off, rows are padded to the micro-batch's longest sequence.
        share_prefixes: Compute a prefix only once if several rows of a micro-batch share it, such as a group's prompt.
            Needs `packing`.
        float32_head: Compute logits in float32 even if weights and hidden states are not, in the rollout engine too.
        flash_attention: Version of flash attention for packed rows on a GPU: 2 is torch's own, 3 is from the package
            `flash_attn_interface`, for compute capability 9.0.
        hsdp_shard_size: Number of consecutive ranks of a role that shard one copy of its weights, such as the ranks of
            a machine. The next ranks hold another copy. None for all ranks of the role.
        timeout_s: Seconds after which a collective fails if a rank has not joined it.
    """

    stage: Literal[3] = 3
    divides_weights = True
    holds_masters = True
    divides_layers = True
    within_setting = "hsdp_shard_size"
    sums_across = True

    def __init__(
        self,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        token_budget: int = 4096,
        packing: bool = True,
        share_prefixes: bool = True,
        float32_head: bool = False,
        flash_attention: Literal[2, 3] = 2,
        hsdp_shard_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if hsdp_shard_size is not None and hsdp_shard_size < 1:
            raise UserError(
                f"`hsdp_shard_size` is {hsdp_shard_size}; give 1 or more ranks, or null for all ranks of a role."
            )
        plan = ForwardPlan(token_budget, packing, share_prefixes)
        self._configure_ranks(precision, plan, float32_head, timeout_s, hsdp_shard_size)
        self._flash_attention = flash_attention

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `DistributedStrategy.check_roles`; an `hsdp_shard_size` must fit a role whose layers are whole."""
        super().check_roles(handles, layouts)
        for name in handles.keys() & layouts.keys():
            for setting in ("tensor_parallel_size", "expert_parallel_size"):
                if (size := getattr(layouts[name], setting)) > 1 and self._within is not None:
                    raise UserError(
                        f"`hsdp_shard_size` is {self._within}, and `placement.{name}.{setting}` is {size}: ranks that"
                        " divide layers hold no copies of weights yet; leave out one of the two"
                    )
        most = max((len(layouts[name].ranks) for name in handles.keys() & layouts.keys()), default=0)
        if self._within is not None and self._within > most:
            raise UserError(f"`hsdp_shard_size` is {self._within}, and roles are on {most} ranks; give {most} or less")

    def divided_over(self, layout: Layout) -> int:
        """See `TrainingStrategy.divided_over`."""
        return self._gathers_within(layout)

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; see `TrainingStrategy.backward`."""
        # A micro-batch's gradient is summed over the ranks that divide the weights, so that no rank holds more than its
        # own rows. The sum over copies of the weights is taken once, after the last micro-batch.
        model: Any = self.roles[name].model
        model.set_requires_all_reduce(last)
        super().backward(name, loss, last)

    def _update(self, name: str, role: Role, most: float) -> float:
        """Apply the gradients; see `TrainingStrategy._update`.

        Each rank that divides a layer takes the norm of its whole weights by itself, so all take that of the first.
        """
        layer = self._groups_of(name).layer

        def of_first(norm: Tensor) -> Tensor:
            if layer is not None:
                dist.broadcast(norm, group=layer, group_src=0)
            return norm

        return role.clip_and_step(most, of_first)

    def _materialize(self, name: str, model: PackedModel) -> None:
        """Apply `fully_shard`, then allocate this rank's rows; see `TrainingStrategy._materialize`.

        Trained weights are float32, since the optimizer updates them; forward passes compute in `dtype`.
        """
        # Torch's FSDP and DTensor are imported where they are used: they take half a second.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        _refuse_scalars(name, model)
        wide = torch.promote_types(self.dtype, torch.float32)
        for parameter in model.parameters():
            if parameter.requires_grad or model.held_as_trained:
                parameter.data = parameter.data.to(wide)
        mesh, experts, layer = self._mesh(name), self._expert_mesh(name), None
        divides_layers = "tensor" in (mesh.mesh_dim_names or ())
        if divides_layers or experts is not None:
            # It says of each tensor that ranks divide twice that two gathers make it whole, which is so.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        if divides_layers:
            layer, mesh = mesh["tensor"], mesh["shard"]
            divide_layers(model, layer)
        units = [(unit, mesh) for unit in _units(model)]
        if experts is not None:
            # Before the layers that they are in, so that these leave them alone.
            divided = divide_experts(model, experts["expert"], layer)
            units = [*((unit, experts["shard"]) for unit in divided), *units]
        policy = MixedPrecisionPolicy(self.dtype, wide, cast_forward_inputs=False)
        for unit, over in units:
            sharded = fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=True)
            sharded.set_force_sum_reduction_for_comms(True)  # FSDP would average over the ranks
            sharded.set_gradient_divide_factor(1.0)
        device = self.root_device
        replace_parameters(model, lambda of: nn.Parameter(torch.empty_like(of, device=device), of.requires_grad))

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        return _full(parameter.detach().to(self._read_in(parameter)))

    def _empty_whole(self, parameter: nn.Parameter) -> Tensor:
        return super()._empty_whole(parameter).to(self._read_in(parameter))

    def _read_in(self, parameter: Tensor) -> torch.dtype:
        """The dtype in which forward passes read a parameter: `dtype`; a buffer has its own."""
        return self.dtype if isinstance(parameter, nn.Parameter) else parameter.dtype

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        return _full(super()._gradient(parameter))

    def _part_of(self, parameter: Tensor) -> TensorRange:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(parameter, DTensor)
        mesh, (_, *width) = parameter.device_mesh, parameter.shape
        # With n rows and r ranks, the first ranks have ceil(n / r) rows each. The last ranks have the rest, which may
        # be nothing.
        _, first = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        held: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
        if held.shape[1:] == parameter.shape[1:]:
            return TensorRange(first[0] * math.prod(width), held.view(-1))
        return TensorRange(first[0] * width[0] + first[1], held, width[0])

    def _copies(self, name: str, parameter: Tensor) -> tuple[int, int]:
        from torch.distributed.tensor import DTensor

        layout = self.layout(name)
        if (size := layout.tensor_parallel_size) > 1:
            assert isinstance(parameter, DTensor)
            divided = parameter.device_mesh.ndim > 1 and parameter.placements[1].is_shard()
            return (0, 1) if divided else (layout.ranks.index(self.global_rank) % size, size)
        width = self.divided_over(layout)
        return layout.ranks.index(self.global_rank) // width, len(layout.ranks) // width

    def _mesh(self, name: str) -> DeviceMesh:
        """The role's ranks as a mesh for `fully_shard`: `[shard]`, with copies of weights `[replicate, shard]`.

        Where ranks divide layers it is `[shard, tensor]`: ranks 0 to 3 by twos are `[[0, 1], [2, 3]]`. Those of a row
        divide each layer, and those of a column divide their part of each parameter once more.

        Ranks 0 to 7 with `hsdp_shard_size: 4` are `[[0, 1, 2, 3], [4, 5, 6, 7]]`: those of a row divide each parameter,
        and those of a column, such as 1 and 5, hold the same part.
        """
        groups, device, layout = self._groups_of(name), self.root_device.type, self.layout(name)
        if groups.layer is not None:
            assert groups.within is not None
            rows = torch.tensor(layout.ranks).view(-1, layout.tensor_parallel_size)
            both = [groups.within, groups.layer]
            return DeviceMesh.from_group(both, device, rows, mesh_dim_names=("shard", "tensor"))
        if groups.within is None or groups.across is None:
            return DeviceMesh.from_group(groups.all, device, mesh_dim_names=("shard",))
        rows = torch.tensor(layout.ranks).view(-1, self.divided_over(layout))
        both = [groups.across, groups.within]
        return DeviceMesh.from_group(both, device, rows, mesh_dim_names=("replicate", "shard"))

    def _expert_mesh(self, name: str) -> DeviceMesh | None:
        """The role's ranks as a mesh for its experts, `[shard, expert]`; None if ranks do not divide experts.

        Ranks 0 to 3 by twos are `[[0, 1], [2, 3]]`. Those of a row divide the experts of a layer, and those of a column
        have the same experts and divide them once more.
        """
        groups, layout = self._groups_of(name), self.layout(name)
        if groups.experts is None:
            return None
        assert groups.same_experts is not None
        rows = torch.tensor(layout.ranks).view(-1, layout.expert_parallel_size)
        both = [groups.same_experts, groups.experts]
        return DeviceMesh.from_group(both, self.root_device.type, rows, mesh_dim_names=("shard", "expert"))


def _units(model: PackedModel) -> Iterator[nn.Module]:
    """The modules to call `fully_shard` on, children first: layers, embedding and output layer if untied, the model.

    The weights of one such module are gathered together, without those of the modules before it.
    """
    layers = set(model.model._no_split_modules or ())  # transformers, too, does not split these
    yield from [module for module in model.modules() if type(module).__name__ in layers]
    embedding, output = model.model.get_input_embeddings(), model.model.get_output_embeddings()
    if output is not None and output.weight is not embedding.weight:  # if tied, they belong to the rest
        yield from (embedding, output)
    yield model


def _refuse_scalars(name: str, model: PackedModel) -> None:
    for key, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise UserError(
                f"`{name}` has the weight {model.hf_name(key)!r}, a single number, which FSDP cannot divide; use"
                " `strategy: deepspeed`"
            )


def _full(tensor: Tensor) -> Tensor:
    """The full tensor of a `DTensor`, gathered by all its ranks; any other tensor unchanged."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole
