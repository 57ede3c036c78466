"""DeepSpeed ZeRO 0 to 3 on CUDA and on the CPU, one engine per trained role. No other module imports DeepSpeed."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.errors import UserError, about, require
from rlflow.models.handle import ForwardPlan, ModelHandle
from rlflow.models.optimizer import Optimizer
from rlflow.models.packed import PackedModel
from rlflow.models.weights import Weight
from rlflow.storage.safetensors_files import TensorRange
from rlflow.strategies.distributed import (
    TIMEOUT_S,
    DistributedStrategy,
    RoleGroups,
    consecutive,
    replace_parameters,
)
from rlflow.strategies.role import FIRST, Role
from rlflow.strategies.strategy import WEIGHT
from rlflow.values.layout import Layout

REDUCE_BUCKET_SIZE = 50_000_000  # 200 MB in float32: enough for a network, and no burden where a layer is larger
PERSISTENT_ELEMENTS = 10_000  # ZeRO-3 keeps smaller parameters whole on every rank: norms and biases


class DeepSpeedStrategy(DistributedStrategy):
    """Data-parallel training with ZeRO. At every stage and number of ranks, gradients are those of the global loss.

    In a config:

        strategy: deepspeed                   # ZeRO-2 in float32

        strategy:
          class_path: deepspeed
          init_args: {stage: 3, precision: bf16, offload_optimizer: true}

    Args:
        stage: Stage of ZeRO. Sharded over ranks are: in 0 nothing, in 1 optimizer states, in 2 optimizer states and
            gradients, in 3 optimizer states, gradients and weights.
        precision: Precision of weights and forward passes. With `bf16` and `fp16`, master weights are float32, and
            gradients are summed in float32. `fp16` scales the loss, and skips updates whose gradient overflows.
        token_budget: Maximum number of tokens in a micro-batch. A longer sequence gets its own micro-batch.
        packing: Run forward passes without padding. If off, rows are padded to the micro-batch's longest sequence.
        share_prefixes: Compute a prefix only once if several rows of a micro-batch share it, such as a group's prompt.
            Needs `packing`.
        float32_head: Compute logits in float32 even if weights and hidden states are not, in the rollout engine too.
        flash_attention: Version of flash attention for packed rows on a GPU: 2 is torch's own, 3 is from the package
            `flash_attn_interface`, for compute capability 9.0.
        offload_optimizer: Store optimizer states in CPU memory and update weights there (CUDA; stage 1 or more). This
            saves 12 bytes of GPU memory for each weight. It is off by default, since each step then sends gradients and
            weights over PCIe.
        offload_param: Store weights in CPU memory, and send each layer to the GPU when it is used (CUDA; stage 3).
            Off by default: it is for models whose weights do not fit on the GPUs even if they are sharded.
        overlap_comm: Reduce gradients, and gather weights at stage 3, on a separate CUDA stream while the backward pass
            runs. Off by default, as it was never compared on a GPU.
        reduce_bucket_size: Maximum number of elements in a bucket: of gradients that are reduced together, and at stage
            3 of weights that are gathered in advance. No bucket is larger than the model's largest layer. A bucket is
            allocated in full, with 4 bytes an element.
        max_live_parameters: Number of elements of weights that stay gathered at stage 3, give or take one parameter, so
            that they are not gathered again. None for the size of the largest layer; memory then does not grow with the
            number of layers.
        hpz_partition_size: Number of ranks of one node that hold a second, sharded copy of the weights at stage 3, for
            a role with more ranks. The first forward pass after an update gathers over all ranks. Later forward passes
            and backward passes gather within the node. The copy costs each rank the model's weights divided by this
            number. None for no second copy.
        timeout_s: Seconds after which a collective fails if a rank has not joined it.
    """

    stage: Literal[0, 1, 2, 3]
    can_offload = True
    within_setting = "hpz_partition_size"

    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] = 2,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        token_budget: int = 4096,
        packing: bool = True,
        share_prefixes: bool = True,
        float32_head: bool = False,
        flash_attention: Literal[2, 3] = 2,
        offload_optimizer: bool = False,
        offload_param: bool = False,
        overlap_comm: bool = False,
        reduce_bucket_size: int = REDUCE_BUCKET_SIZE,
        max_live_parameters: int | None = None,
        hpz_partition_size: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        require("deepspeed", "DeepSpeedStrategy", "deepspeed")
        if stage not in (0, 1, 2, 3):
            raise UserError(f"`stage` is {stage}; ZeRO has the stages 0, 1, 2 and 3.")
        if offload_optimizer and stage == 0:
            raise UserError("`offload_optimizer` needs ZeRO, and `stage` is 0. Use stage 1, 2 or 3.")
        of_divided: dict[str, int | None] = {
            "max_live_parameters": max_live_parameters,
            "hpz_partition_size": hpz_partition_size,
        }
        if stage != 3:
            for name, value in {"offload_param": offload_param, **of_divided}.items():
                if value:
                    raise UserError(f"`{name}` is {value}, and `stage` is {stage}; only stage 3 divides weights.")
        if reduce_bucket_size < 1:
            raise UserError(
                f"`reduce_bucket_size` is {reduce_bucket_size}; give 1 or more, such as {REDUCE_BUCKET_SIZE}"
            )
        for name, least in {"max_live_parameters": 1, "hpz_partition_size": 2}.items():
            if (value := of_divided[name]) is not None and value < least:
                raise UserError(f"`{name}` is {value}; give {least} or more, or null.")
        self.stage = stage
        plan = ForwardPlan(token_budget, packing, share_prefixes)
        self._configure_ranks(precision, plan, float32_head, timeout_s, hpz_partition_size)
        self._flash_attention = flash_attention
        self.divides_weights = stage == 3
        self.offload_optimizer = offload_optimizer
        self.offload_param = offload_param
        self.overlap_comm = overlap_comm
        self.reduce_bucket_size = reduce_bucket_size
        self.max_live_parameters = max_live_parameters
        self.hpz_partition_size = hpz_partition_size
        # DeepSpeed's engines. Their type is not named: jsonargparse would then import deepspeed when it reads a config.
        # No device is chosen at that time, and DeepSpeed would choose one for the whole process.
        self._engines: dict[str, Any] = {}

    def use_precision(self, precision: str) -> None:
        """See `TrainingStrategy.use_precision`; refuses `fp16` at stage 0."""
        if precision == "fp16" and self.stage == 0:
            raise UserError(
                "`precision` is 'fp16', and `stage` is 0, at which DeepSpeed sums gradients in float16 and does not"
                " scale the loss; use stage 1, 2 or 3, or `strategy: fsdp`."
            )
        super().use_precision(precision)

    def check_roles(self, handles: Mapping[str, ModelHandle], layouts: Mapping[str, Layout]) -> None:
        """See `DistributedStrategy.check_roles`; refuses Adagrad where DeepSpeed divides its states."""
        super().check_roles(handles, layouts)
        for name in handles.keys() & layouts.keys() if self.stage else ():
            optimizer = handles[name].optimizer
            if optimizer is not None and issubclass(optimizer.kind, torch.optim.Adagrad):
                with about(optimizer):
                    raise UserError(
                        f"`optimizer.name` is {optimizer.name!r}, which DeepSpeed replaces by one without the run's"
                        f" learning rates at `stage` {self.stage}; take another, or `stage: 0`"
                    )

    def backward(self, name: str, loss: Tensor, last: bool) -> None:
        """Add a micro-batch's gradient; see `TrainingStrategy.backward`."""
        engine, role = self._engine(name), self.roles[name]
        if role.loss_scale is not None:  # replaces DeepSpeed's own scale
            engine.optimizer.loss_scaler.cur_scale = role.scaled_by
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the role's ranks; the factor makes it a sum. Each copy of a shard adds a part of it.
        engine.backward(loss * len(self.layout(name).ranks), scale_wrt_gas=False)

    def _before_joining(self) -> None:
        super()._before_joining()
        if self.root_device.type == "cuda" and self.root_device.index != self.local_rank:
            raise UserError(
                f"`trainer.devices` gives GPU {self.root_device.index} to local rank {self.local_rank}, and DeepSpeed "
                "takes GPUs from 0 on. Choose them with the environment variable CUDA_VISIBLE_DEVICES."
            )
        os.environ["DS_ACCELERATOR"] = self.root_device.type  # DeepSpeed reads it only when it is imported

    def _materialize(self, name: str, model: PackedModel) -> None:
        """Give each parameter memory for this rank's part, as zeros; see `TrainingStrategy._materialize`. Stage 3 only.

        Parameters are allocated whole and divided one after another. So at its peak, memory holds all parts and one
        whole parameter.
        """
        import deepspeed

        self._refuse_across_nodes(name)
        groups = self._join(name)
        settings = {"data_parallel_group": groups.all, "mpu": groups, "zero_param_parallel_group": groups.within}
        divider = deepspeed.zero.Init(config_dict_or_path=self._config(name, model, None), **settings)

        def divided(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
            whole = torch.empty(parameter.shape, dtype=self.dtype, device=self.root_device)
            made: Any = torch.nn.Parameter(whole, parameter.requires_grad)
            divider._convert_to_deepspeed_param(made)  # as `Init(module=...)` without a broadcast
            made.partition()
            made.ds_tensor.zero_()
            made.ds_secondary_tensor = None  # DeepSpeed makes it when the parameter is first gathered
            return made  # type: ignore[no-any-return]

        replace_parameters(model, divided)

    def _wrap(self, name: str, role: Role) -> torch.nn.Module:
        model = super()._wrap(name, role)
        if role.optimizer is None and self.stage < 3:
            return model
        import deepspeed

        groups = self._join(name)
        engine: torch.nn.Module
        with nullcontext() if role.optimizer is None else role.standing_still():
            engine, *_ = deepspeed.initialize(
                config=self._config(name, role.model, role.handle.optimizer),
                model=role.model,
                optimizer=role.optimizer,
                mpu=groups,
                dist_init_required=False,
            )
        if role.optimizer is not None and self.stage == 0 and self.dtype == torch.bfloat16:
            # DeepSpeed has made an update with gradients of 0, after which the first one would be AdamW's second.
            role.optimizer.state.clear()
        engine.register_forward_pre_hook(lambda *_: turn_to(groups))
        self._engines[name] = engine
        return engine

    def _join(self, name: str) -> SimpleNamespace:
        """Let DeepSpeed use the process group, and direct its collectives at the role's ranks; returns its `mpu`."""
        join(self.root_device, self.dtype, self.processes.process_group_backend)
        groups = mpu(self._groups_of(name))
        turn_to(groups)
        return groups

    def _config(self, name: str, model: PackedModel, optimizer: Optimizer | None) -> dict[str, Any]:
        """DeepSpeed's configuration of a role; its defaults (clipping at 1.0, printing, timing) are off."""
        layer = model.largest_layer(lambda parameter: self._full_shape(parameter).numel())
        on_gpu = self.root_device.type == "cuda"
        bucket = -2 * (-min(self.reduce_bucket_size, layer) // 2)  # even, for NCCL
        live = layer if self.max_live_parameters is None else self.max_live_parameters
        zero: dict[str, Any] = {
            "stage": self.stage,
            "memory_efficient_linear": False,  # it would replace torch's function in the whole process
            "overlap_comm": self.overlap_comm,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "sub_group_size": bucket,  # updated together, with temporary copies of this size
            "stage3_prefetch_bucket_size": bucket,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        }
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        if self.offload_param:
            zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
        if self._groups_of(name).within is not None:
            zero["zero_hpz_partition_size"] = self.hpz_partition_size
        return {
            "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed, has no effect here
            "gradient_accumulation_steps": 1,  # the boundary is set by hand in `backward`
            "gradient_clipping": 0.0 if optimizer is None else optimizer.gradient_clipping,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "fp16": {"enabled": self.dtype == torch.float16, "loss_scale": FIRST},  # `backward` sets it for each update
            "data_types": {"grad_accum_dtype": "fp32" if self.stage else None},
            "communication_data_type": "fp32",
            "steps_per_print": None,
            "wall_clock_breakdown": False,
            "timers": {"throughput": {"enabled": False}},
        }

    def _engine(self, name: str) -> Any:
        """The role's DeepSpeed engine, with DeepSpeed's collectives directed at the role's ranks."""
        turn_to(self._engines[name].mpu)
        return self._engines[name]

    def _update(self, name: str, role: Role, most: float) -> float:
        engine = self._engine(name)
        if engine.optimizer is role.optimizer:  # float32 at stage 0: not wrapped, and DeepSpeed has no norm
            return super()._update(name, role, most)
        with norm_at_most(engine.optimizer, most) as found:
            engine.step()
        if self.stage in (1, 2) and len(engine.optimizer.param_groups) > 1:
            # DeepSpeed maps weights to the optimizer's states after the first group's update, before others have any.
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        return found.get("norm", float(norm))

    def _full(self, weights: list[Weight], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        # DeepSpeed gathers weights in advance. After a forward pass without a backward pass, some that the backward
        # pass would have read are still being gathered, and must be released before they can be gathered again.
        for engine in self._engines.values() if self.stage == 3 else ():
            engine.empty_partition_cache()
        yield from super()._full(weights, bucket_bytes)

    def _gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]:
        """A context in which these parameters are whole on this rank; at stage 3 all ranks of the role enter it."""
        if self.stage < 3:
            return super()._gathered(parameters)
        import deepspeed

        gathered: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(parameters)
        return gathered

    def _full_shape(self, parameter: torch.nn.Parameter) -> torch.Size:
        shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)  # it has no `ds_shape` before it is divided
        return shape

    def _part_of(self, parameter: Tensor) -> TensorRange:
        if self.stage < 3:
            return super()._part_of(parameter)
        return _own_part(parameter, parameter.ds_tensor)  # type: ignore[attr-defined]

    def _gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(parameter)
        return gradient

    def _copies(self, name: str, parameter: Tensor) -> tuple[int, int]:
        """`(0, 1)` if ranks hold disjoint parts. At stage 0 each rank holds the whole state: rank 2 of 4 has `(2, 4)`.

        Below stage 3, each rank also holds the whole of an average that has no float32 parts of its own.
        """
        ranks, average = self.layout(name).ranks, self.roles[name].average
        whole = self.stage < 3 and average is not None and not average.parts  # the weights are the average
        return (ranks.index(self.global_rank), len(ranks)) if whole or self.stage == 0 else (0, 1)

    @torch.no_grad()
    def _renew_average(self, name: str) -> None:
        average = self.roles[name].average
        assert average is not None, name
        if self.stage in (0, 3):
            super()._renew_average(name)
        elif average.parts:
            group = self._groups_of(name).all
            for key, part in average.parts.items():  # each number is on one rank; the others add 0
                whole = torch.zeros_like(average.weights[key]).view(-1)
                whole[part.start : part.start + len(part.values)] = part.values.to(whole)
                dist.all_reduce(whole, group=group)
                average.weights[key].copy_(whole.view_as(average.weights[key]))
        if self.stage == 3:  # weights that stayed gathered, and second copies within nodes, are outdated
            self._engine(name).optimizer.partition_all_parameters()
            for parameter in self.roles[name].model.parameters():
                parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]

    def _state_parts_of(self, name: str, parameter: torch.nn.Parameter, kinds: list[str]) -> dict[str, TensorRange]:
        """This rank's ranges of DeepSpeed's float32 weight and optimizer states; empty where it holds none of them."""
        if self.stage == 0:
            pairs = self._masters(name)
            master = next((master for weight, master in pairs if weight is parameter), parameter)
            return super()._state_parts_of(name, master, kinds)
        if self.stage == 3:
            from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

            held = {WEIGHT: safe_get_local_fp32_param(parameter)}
            held |= {kind: safe_get_local_optimizer_state(parameter, kind) for kind in kinds}
            return {kind: _own_part(parameter, tensor) for kind, tensor in held.items()}
        # DeepSpeed's functions for stages 1 and 2 gather. So its map from weights to flat float32 masters is read.
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:  # the parameter is on other ranks
            return {kind: TensorRange(0, torch.empty(0)) for kind in (WEIGHT, *kinds)}
        start = fragment.lp_fragment_address.start
        return {WEIGHT: TensorRange(start, fragment.hp_fragment)} | {
            kind: TensorRange(start, fragment.get_optim_state_fragment(kind)) for kind in kinds
        }

    def _set_state_parts(
        self, name: str, parameter: torch.nn.Parameter, kinds: list[str], read: Callable[[str, int, int], Tensor]
    ) -> None:
        if self.stage < 3:
            super()._set_state_parts(name, parameter, kinds, read)
            return
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        # Parts have equal lengths, so shorter ones are padded with 0. Each part is set as a whole, since DeepSpeed may
        # have moved it to the CPU.
        own = self._part_of(parameter)
        padded: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        padding = (0, padded.numel() - own.values.numel())
        for kind in (WEIGHT, *kinds):
            values = torch.nn.functional.pad(read(kind, own.start, own.values.numel()), padding)
            if kind == WEIGHT:
                safe_set_local_fp32_param(parameter, values)
                padded.data.copy_(values)
            else:
                safe_set_local_optimizer_state(parameter, values, kind)

    def _renew_copies(self, name: str) -> None:
        optimizer = self._engine(name).optimizer
        if self.stage == 0:
            for weight, master in self._masters(name):
                weight.data.copy_(master)
        elif self.stage < 3:
            optimizer.update_lp_params()
        else:  # weights that ranks hold whole
            optimizer.checkpoint_event_prologue()
            optimizer.checkpoint_event_epilogue()

    def _masters(self, name: str) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Pairs of a bf16 parameter and its float32 master at stage 0; none in float32, which has no masters."""
        if self.dtype == torch.bfloat16:
            optimizer = self._engine(name).optimizer
            for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                yield from zip(weights, masters, strict=True)

    def _refuse_across_nodes(self, name: str) -> None:
        """Raise a `UserError` where `hpz_partition_size` consecutive ranks of the role are on more than one node."""
        within, ranks, per_node = self.hpz_partition_size, self.layout(name).ranks, self.processes.num_processes
        parts = consecutive(ranks, within) if within is not None and within < len(ranks) else []
        if any(len({rank // per_node for rank in part}) > 1 for part in parts):
            raise UserError(
                f"`hpz_partition_size` is {within}, and `{name}` lives on {len(ranks)} ranks, {per_node} to a node,"
                f" which cannot be taken {within} at a time within nodes; give a number that divides its ranks of each"
                " node, or null"
            )


def _own_part(parameter: Any, padded: Tensor) -> TensorRange:
    """This rank's part of a tensor as ZeRO-3 divides it, without the padding that gives all parts the same length.

    With 10 elements on 4 ranks a part has 3: ranks 0 to 2 start at 0, 3 and 6, and rank 3 has only element 9.
    """
    start = padded.numel() * dist.get_rank(parameter.ds_process_group)
    length = min(padded.numel(), max(0, parameter.ds_numel - start))
    return TensorRange(min(start, parameter.ds_numel), padded.detach()[:length])


def join(device: torch.device, dtype: torch.dtype, backend: str | None) -> None:
    """Import DeepSpeed and let it use the process group that this rank has already joined.

    Args:
        device: Device of this rank.
        dtype: Dtype of forward passes.
        backend: Backend of the process group, such as `gloo` or `cpu:gloo,cuda:nccl`.

    Raises:
        UserError: This process has used DeepSpeed on another kind of device, or DeepSpeed does not train in `dtype` on
            this device.
    """
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    if (used := deepspeed.get_accelerator().device_name()) != device.type:
        raise UserError(
            f"the run is on the device {device}, and DeepSpeed was imported for `{used}` in this process,"
            " which it cannot change; start a new process"
        )
    if dtype == torch.float16 and not deepspeed.get_accelerator().is_fp16_supported():
        raise UserError(
            f"`precision` is 'fp16', in which DeepSpeed does not train on this machine's {device.type};"
            " set `strategy: fsdp`, or `precision: bf16`"
        )
    # This operator is for inference only. It would be compiled first: for a minute, or forever if an earlier
    # compilation was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(backend)
    _keep_within_role()


def mpu(groups: RoleGroups) -> SimpleNamespace:
    """A role's groups in the form of Megatron's `mpu`; DeepSpeed calls its methods.

    The data-parallel group is all ranks of the role, over which ZeRO divides states. The model-parallel group is this
    rank alone, since no layer is divided. `all` and `within` are for `turn_to`.
    """
    return SimpleNamespace(
        all=groups.all,
        within=groups.within,
        get_data_parallel_group=lambda: groups.all,
        get_data_parallel_world_size=groups.all.size,
        get_data_parallel_rank=groups.all.rank,
        get_model_parallel_group=lambda: groups.alone,
        get_model_parallel_world_size=groups.alone.size,
        get_model_parallel_rank=groups.alone.rank,
    )


def turn_to(groups: SimpleNamespace) -> None:
    """Direct DeepSpeed's collectives at the ranks of one role.

    DeepSpeed keeps its groups in globals of the process, whichever engine is used. A rank with several roles has to
    call this before each use of a role's engine.

    Args:
        groups: The role's groups, from `mpu`.
    """
    from deepspeed.utils import groups as current

    current.mpu = groups
    current._ZERO_PARAM_INTRA_PARALLEL_GROUP = groups.within


@cache
def _keep_within_role() -> None:
    """Patch two collectives of ZeRO-3 that expect all ranks of the job; some ranks may not hold the role.

    One is a barrier while weights are divided. The other compares the order in which a forward pass reads the weights
    with that of global rank 0. Both are now among the ranks of the role that `turn_to` was last called with.
    """
    from deepspeed import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.utils import groups

    everybody = comm.barrier

    def barrier(group: Any = None, **settings: Any) -> Any:
        return everybody(group or groups.mpu.all, **settings)

    def refuse_unlike(numbers: list[int]) -> None:
        # Ranks count the weights of all their roles, so only the differences are alike.
        digest = hash(tuple(number - numbers[0] for number in numbers))
        ends = torch.tensor([digest, -digest])
        dist.all_reduce(ends, dist.ReduceOp.MAX, groups.mpu.all)
        if int(ends[0]) != -int(ends[1]):
            raise RuntimeError("the ranks of a role read its weights in different orders")

    comm.barrier = barrier
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = refuse_unlike


@contextmanager
def norm_at_most(optimizer: Any, most: float) -> Iterator[dict[str, float]]:
    """A context in which an optimizer of ZeRO 1 to 3 skips an update whose gradient has a norm above `most`.

    The optimizer's step measures the norm by `scaled_global_norm` at stages 1 and 2, and by `_get_norm_groups` at stage
    3. It skips the update if the norm is not finite. In this context that method returns infinity for a norm above
    `most`.

    Args:
        optimizer: DeepSpeed's optimizer.
        most: The largest norm of the unscaled gradient that is applied; infinite for no limit.

    Yields:
        A dictionary that is filled during the step: `{"norm": 37.5}` if this norm was too large and the update is
        skipped; else it stays empty.

    Raises:
        UserError: The optimizer has neither method, as at stage 0 in half precision.
    """
    found: dict[str, float] = {}
    if math.isinf(most):
        yield found
        return
    method = next((name for name in ("scaled_global_norm", "_get_norm_groups") if hasattr(optimizer, name)), None)
    if method is None:
        raise UserError(
            "`trainer.grad_norm_spike_limit` is set, and DeepSpeed's optimizer of stage 0 in half precision takes every"
            " gradient; set `stage` to 1, 2 or 3, use `strategy: fsdp`, or leave `grad_norm_spike_limit` out"
        )
    measure = getattr(optimizer, method)

    def measured(*given: Any, **by_name: Any) -> Any:
        norms = measure(*given, **by_name)
        each = norms if isinstance(norms, list) else [norms]
        total = math.sqrt(sum(float(norm) ** 2 for norm in each)) / float(optimizer.loss_scale)
        if not math.isfinite(total) or min(map(float, each)) < 0 or total <= most:  # -1: not finite
            return norms
        found["norm"] = total
        infinite = torch.full_like(torch.as_tensor(each[0]), math.inf)
        return [infinite] if isinstance(norms, list) else infinite

    setattr(optimizer, method, measured)
    try:
        yield found
    finally:
        delattr(optimizer, method)
