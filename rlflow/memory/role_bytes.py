"""A model on its ranks, and the bytes of each of its parts; all memory estimates are sums of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.models.causal_lm import EMA, CausalLM, WithoutAdapters
from rlflow.models.handle import ModelHandle
from rlflow.models.logprobs import CHUNK_ELEMENTS, chunk_elements_in
from rlflow.models.optimizer import GroupedOptimizer, Optimizer
from rlflow.models.sizes import ModelSize
from rlflow.strategies.strategy import TrainingStrategy
from rlflow.values.layout import Layout

FLOAT32 = 4
ALLREDUCED = 500_000_000  # gradients that DeepSpeed sums at one time at ZeRO 0; it may add those of one more weight
KEPT = {"adamw": 2, "sgd": 0}  # tensors of a weight; to measure them, torch imports its compiler, which takes seconds


@dataclass(frozen=True)
class LoadedRole:
    """A model on its ranks: how it is divided and updated, and the bytes that each part takes on one rank.

    For example an actor of 7.6 thousand million parameters in bf16, by ZeRO-3 on four ranks: `stage` 3, `divided_over`
    4, `width` 2, `moments` 3 (Adam's two and the float32 copy), so that `weights` are 7.6e9 * 2 / 4 bytes.

    Attributes:
        size: Size of the model.
        layout: Layout of its ranks; ranks with the same rows divide each sequence.
        stage: Stage of sharding: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights.
        divided_over: Number of ranks that divide it.
        width: Bytes of a weight in forward passes.
        trained: Number of parameters that are trained; 0 for a frozen role.
        moments: Numbers that the optimizer stores for each trained parameter, a float32 copy of the weight included.
        checkpointing: Whether the backward pass computes activations again.
        updates: Optimizer updates in a step of the run.
        token_budget: Tokens of a micro-batch.
        longest: Tokens of the longest row. If they exceed the token budget, the row is alone in a micro-batch.
        epochs: Passes over a step's rows.
        owns: Whether its ranks hold weights of its own. They do not for a view of another role, or for a policy that
            only engines load.
        offloaded: Whether the optimizer's states are in the CPU's memory.
        weights_offloaded: Whether weights are in the CPU's memory.
        summed_width: Bytes of each number of the optimizer, and of each number of a summed gradient.
        averaged_width: Bytes of each number of a moving average, in addition to the weight that forward passes read; 0
            where there is no average.
        masters: Whether trained weights are in `summed_width` and are rounded to `width` for forward passes.
        reduce_bucket_size: Number of gradients that are reduced together, in a buffer of their own; 0 where those of
            each layer are reduced together without one.
        max_live_parameters: Number of weights that may stay whole at ZeRO 3, beyond those of a layer.
        hpz_partition_size: Number of ranks, such as those of a node, that divide a second copy of the weights; 0 for
            none.
        on_cpu: Whether it is trained on the CPU.
        trains_tower: Whether the tower of a model that reads pictures is trained.
        float32_head: Whether logits are computed in float32 even if weights are narrower.
        adapters: Whether only adapters are trained, and written.
        averaged: Number of parameters that are a moving average of another role's.
        shares_prefixes: Whether its rows may share prefixes: not where layers carry a state, or adapters drop out.
        fused: Whether one kernel reads and writes all that an update of the optimizer needs, without memory of its own.
    """

    size: ModelSize
    layout: Layout
    stage: int
    divided_over: int
    width: int
    trained: int
    moments: int
    checkpointing: bool
    updates: int
    token_budget: int
    longest: float = 0
    epochs: int = 1
    owns: bool = True
    offloaded: bool = False
    weights_offloaded: bool = False
    summed_width: int = 4
    averaged_width: int = 0
    masters: bool = False
    reduce_bucket_size: int = 0
    max_live_parameters: int = 0
    hpz_partition_size: int = 0
    on_cpu: bool = True
    trains_tower: bool = False
    float32_head: bool = False
    adapters: bool = False
    averaged: int = 0
    shares_prefixes: bool = True
    fused: bool = False

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that divide each layer, and compute with their parts."""
        return self.layout.tensor_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks that divide the experts of each layer."""
        return self.layout.expert_parallel_size

    def shares(self, ranks: int) -> list[tuple[float, int]]:
        """The parts that a rank computes with, as shares of all weights: of layers, and of experts if they are divided.

        Args:
            ranks: Number of ranks that divide the weights.

        Returns:
            Each share, and how many of the ranks hold parts of it.
        """
        layers, own = self.tensor_parallel_size, self.expert_parallel_size
        experts = self.size.layers * self._divided_experts / self.size.parameters
        return [
            ((1 - experts) / layers, max(1, ranks // layers)),
            *([(experts / own, max(1, ranks // own))] if own > 1 else []),
        ]

    @property
    def weights_over(self) -> int:
        """Number of ranks that divide the weights; 1 where each rank has all."""
        return self.divided_over if self.stage == 3 else 1

    @property
    def gathered_over(self) -> int:
        """Number of ranks from which a layer is gathered."""
        return self.hpz_partition_size or self.weights_over

    @property
    def states_over(self) -> int:
        """Number of ranks that divide the optimizer's states."""
        return self.divided_over if self.stage >= 1 else 1

    @property
    def weights(self) -> float:
        """Bytes of the weights. ZeRO 3 divides them, and adds a copy that `hpz_partition_size` ranks divide, if any.

        Trained weights may be wider than the weights that forward passes read. A moving average is counted in addition
        to its model's weights.
        """
        average = self.size.parameters * self.averaged_width / self.states_over
        nbytes = self.size.parameters * self.width
        wider = self.trained * (self.summed_width - self.width) if self.masters else 0
        second = nbytes / self.hpz_partition_size if self.hpz_partition_size else 0
        return (nbytes + wider) / self.weights_over + second + average

    @property
    def gradients(self) -> float:
        """Bytes of summed gradients, divided from ZeRO 2 on; below it, gradients in the weights' dtype come on top."""
        if self.stage >= 2:
            return self.trained * self.summed_width / self.divided_over
        return self.trained * (self.summed_width + (self.width if self.width < self.summed_width else 0))

    @property
    def optimizer(self) -> float:
        """Bytes of moments and float32 weights, divided from ZeRO 1 on, on the device or in the CPU's memory."""
        return self.trained * self.summed_width * self.moments / self.states_over

    @property
    def copies(self) -> bool:
        """Whether a float32 copy of the weights is one of the `moments`, as DeepSpeed updates it.

        It has none at ZeRO 0 in float32.
        """
        return not self.masters and (self.stage > 0 or self.width < self.summed_width)

    @property
    def weights_here(self) -> float:
        """Bytes of the weights on the device; 0 if they are in the CPU's memory."""
        return 0.0 if self.weights_offloaded else self.weights

    @property
    def states_here(self) -> float:
        """Bytes of the optimizer's states on the device; 0 if they are in the CPU's memory."""
        return 0.0 if self.offloaded else self.optimizer

    @property
    def gradients_here(self) -> float:
        """Bytes of summed gradients on the device; 0 if they are summed in the CPU's memory.

        Where the optimizer's states are there, DeepSpeed sums there at ZeRO 3, and at ZeRO 2 gradients of float32.
        """
        elsewhere = self.stage == 3 or (self.stage == 2 and self.width == self.summed_width)
        return 0.0 if self.offloaded and elsewhere else self.gradients

    @property
    def in_host_memory(self) -> float:
        """Bytes in the CPU's memory: weights; optimizer states, gradients that these read, and summed gradients.

        Below ZeRO 3, updated weights are there in their own dtype too, before they go to the device.
        """
        own = self.trained / self.states_over
        read = own * (self.summed_width + (self.width if self.stage < 3 else 0))
        states = self.optimizer + read + self.gradients - self.gradients_here
        return (states if self.offloaded else 0.0) + (self.weights if self.weights_offloaded else 0.0)

    @property
    def stepping(self) -> float:
        """Bytes that a step of an Adam that is not fused takes in addition: the root of the second moments."""
        adam = self.moments - self.copies >= 2 and not self.offloaded and not self.fused
        return self.trained * self.summed_width / self.states_over if adam else 0.0

    @property
    def activations(self) -> float:
        """Bytes of a micro-batch's activations: of all layers, or with checkpointing every layer's input and one layer.

        Where ranks divide each sequence, a rank holds its part; where they divide each layer, its part of what is
        within attention and feed-forward layers. Where a tower is trained, the micro-batch is of text alone or of
        pictures alone, whichever takes more: in the second case a token comes with its patches, which count as tokens.
        """
        if not (self.trains_tower and self.size.patches):
            return self._of_decoder
        kept = self.size.tower_width if self.checkpointing else self.size.tower_kept
        of_tower = self.size.patches * self._tokens * kept * self.width  # if each token were of a picture
        return max(self._of_decoder, (self._of_decoder + of_tower) / (1 + self.size.patches))

    @property
    def _of_decoder(self) -> float:
        """Bytes of the decoder's activations, as transformers' layers keep them; attention stores no scores.

        Of a token, each of a layer's norms keeps two vectors, and an RMS norm its input in float32 too. The layer keeps
        queries, keys, values and the result of attention. If queries and keys are normed, it also keeps them before
        that, in float32 and once in the weights' dtype. Within its feed-forward network it keeps 2 vectors, with a gate
        4, and in GPT-OSS 7; of each expert that the token goes to, also the input and the result. A backward pass adds
        a gradient of an inner vector, with a gate 2, or 3 of experts' results where these are larger; and one of the
        layer's width. Ranks that divide a layer have parts of what is within attention and feed-forward networks, and
        all of the rest.
        """
        size, width, ranks = self.size, self.width, self.tensor_parallel_size
        inner = size.intermediate * max(1, size.experts_per_token) / ranks
        routed = size.hidden * size.experts_per_token / ranks
        queries_and_keys = (size.heads + size.kv_heads) * size.head_width / ranks
        norms = size.norms * (size.rms * FLOAT32 + 2 * width) * size.hidden
        attention = (2 * width + size.qk_norm * (FLOAT32 + width)) * queries_and_keys
        layer = norms + attention + width * ((2 + 2 * size.gated + 3 * size.sinks) * inner + 2 * routed)
        gradients = width * (max((1 + size.gated) * inner, 3 * routed) + size.hidden)
        kept = size.layers * (width * size.hidden if self.checkpointing else layer)
        return self._tokens * (kept + gradients + (layer if self.checkpointing else 0))

    def logits(self, capacity: float) -> float:
        """Bytes of the chunk of a micro-batch's logits that is in memory at one time, and of gradients.

        Args:
            capacity: Bytes of the rank's device.
        """
        chunk = CHUNK_ELEMENTS if self.on_cpu else chunk_elements_in(int(capacity))
        of_chunk = min(chunk, self._tokens * self.size.outputs / self.tensor_parallel_size)
        return 2.0 * FLOAT32 * of_chunk + self._head

    @property
    def _head(self) -> float:
        """Bytes of the output layer in addition to a chunk of logits, whose gradients a backward pass adds up.

        They are the gradients' sum in float32, and for narrower weights a chunk's gradient; or the layer in float32.
        """
        narrow, adapters = self.width < FLOAT32, self.trained < self.size.parameters - self.size.tower
        nbytes = FLOAT32 if narrow and self.float32_head else 0
        if not adapters:
            nbytes += FLOAT32 + (self.width if narrow and not self.float32_head else 0)
        return self.size.outputs * self.size.hidden * nbytes / self.tensor_parallel_size

    @property
    def gathered(self) -> float:
        """Bytes of weights gathered at one time at ZeRO 3 (embedding, layer or `max_live_parameters`) or by FSDP."""
        if self.stage < 3:
            return 0.0
        pieces = 2 if self.masters else 1
        whole = max(pieces * self._largest, self.max_live_parameters)
        return float(min(self.size.parameters, whole) * self.width)

    @property
    def reduced(self) -> float:
        """Bytes that reducing gradients takes for a while, in addition to the `buffer` that ZeRO-3 has all the time.

        These are the gradients of a backward pass, at ZeRO 1 and 2 also the buffer, and a copy being sent. FSDP has no
        buffer and reduces all gradients of a layer together.
        """
        if not self.trained or self.divided_over == 1:
            return 0.0
        if self.stage == 0:  # flattened, and in float32
            flat = min(self.trained, ALLREDUCED + self.size.largest_layer)
            return float(flat * (self.summed_width + (self.width if self.width < self.summed_width else 0)))
        if self.masters:
            return float(min(self._largest, self.trained) * (self.width + self.summed_width))
        return float(self.reduce_bucket_size * (self.width + self.summed_width * (0 if self.stage == 3 else 2)))

    @property
    def buffer(self) -> float:
        """Bytes of ZeRO-3's buffer of gradients, which is never freed; 0 for other stages."""
        return float(self.reduce_bucket_size * self.summed_width) if self.stage == 3 else 0.0

    @property
    def loading(self) -> float:
        """Most bytes while the role is loaded: the whole role, or at ZeRO 3 this rank's part and one piece."""
        if self.stage == 3:
            return self.loaded + self.piece
        if self.stage:  # trained weights are flattened, then this rank's part is cut out and copied
            return max(self.weights + self.trained * self.width, self.loaded + self._copied)
        return self.loaded

    @property
    def loaded(self) -> float:
        """Bytes of the loaded role before its first step: weights, their float32 copy, and at ZeRO 3 gradients."""
        return self.weights_here + self._copied + self._gradients_at_rest

    @property
    def resting(self) -> float:
        """Bytes between steps, after the first: weights, states, and at ZeRO-3 gradients and buffers not freed."""
        return self.weights_here + self.states_here + self._gradients_at_rest + self.buffer

    def sync(self, buffer: float) -> float:
        """Most bytes while weights are sent to an engine, or written to a file.

        Args:
            buffer: Bytes of weights that are gathered at one time; the largest piece is gathered even if it is larger.
        """
        return self.resting + min(max(buffer, self.piece), self.size.parameters * self.width)

    @property
    def resuming(self) -> float:
        """Most bytes while a checkpoint is read; for a trained role, an update first makes the optimizer's states."""
        read = max(self.loading, self.resting + self.piece)
        if not self.trained:
            return read
        moved = self.gathered + self.reduced
        return max(read, self.resting + (self.gradients_here - self._gradients_at_rest) + max(moved, self.stepping))

    @property
    def piece(self) -> float:
        """Bytes of the largest layer or embedding."""
        return float(self.size.largest_layer * self.width)

    @property
    def _divided_experts(self) -> int:
        """Parameters of a layer's experts, where ranks divide these."""
        return self.size.experts * self.size.expert if self.expert_parallel_size > 1 else 0

    @property
    def _largest(self) -> float:
        """Parameters of the largest layer or embedding, as far as a rank computes with it."""
        layers, experts = self.tensor_parallel_size, self._divided_experts
        layer = (self.size.layer - experts) / layers + experts / self.expert_parallel_size
        return max(self.size.embedding / layers, layer)

    @property
    def _tokens(self) -> float:
        return max(self.token_budget, self.longest) / self.layout.sequence_parallel_size

    @property
    def _copied(self) -> float:
        """Bytes of the float32 copy of the weights on the device."""
        return self.copies * self.trained * self.summed_width / self.states_over if not self.offloaded else 0.0

    @property
    def _gradients_at_rest(self) -> float:
        return self.gradients_here if self.stage == 3 and not self.masters else 0.0  # FSDP frees them


def loaded_role(
    handle: ModelHandle,
    size: ModelSize,
    strategy: TrainingStrategy,
    layout: Layout,
    *,
    samples: int,
    longest: float = 0,
    on_cpu: bool = False,
    owns: bool = True,
) -> LoadedRole:
    """A model of a module as a strategy loads it.

    Args:
        handle: The model.
        size: Size of the model, with an output layer for the vocabulary.
        strategy: Strategy that trains it.
        layout: Layout of its ranks.
        samples: Samples of a step.
        longest: Tokens of the longest row.
        on_cpu: Whether it is trained on the CPU; then the optimizer's states are in the CPU's memory anyway.
        owns: Whether a rank loads it, and not engines alone.
    """
    optimizer = handle.optimizer
    if not isinstance(handle, CausalLM):
        size = size.with_labels(1)
    trained = 0 if optimizer is None else _trainable(handle, size)
    stage = strategy.stage or 0
    width = torch.finfo(strategy.dtype).bits // 8
    hpz_partition_size = strategy.hpz_partition_size or 0
    divides = strategy.stage is not None
    # An average is a float32 copy of narrower weights. If trained weights are stored in float32, so is the average, and
    # only the bytes count that it has more than the weights.
    averages = isinstance(handle, EMA) and width < FLOAT32
    role = LoadedRole(
        size=size,
        layout=layout,
        stage=stage,
        divided_over=strategy.divided_over(layout),
        width=width,
        trained=trained,
        moments=0 if optimizer is None else _kept_by(optimizer),
        checkpointing=handle.gradient_checkpointing,
        updates=handle.epochs * math.ceil(samples / (handle.samples_per_update or samples)),
        token_budget=strategy.forward_plan.token_budget,
        longest=longest,
        epochs=handle.epochs,
        owns=owns and not isinstance(handle, WithoutAdapters),
        offloaded=strategy.offload_optimizer and not on_cpu,
        weights_offloaded=strategy.offload_param and not on_cpu,
        summed_width=FLOAT32 if divides else width,
        averaged_width=FLOAT32 - (width if strategy.holds_masters else 0) if averages else 0,
        masters=strategy.holds_masters,
        reduce_bucket_size=min(strategy.reduce_bucket_size, size.largest_layer) if stage and trained else 0,
        max_live_parameters=strategy.max_live_parameters or 0,
        hpz_partition_size=hpz_partition_size if hpz_partition_size < len(layout.ranks) else 0,
        on_cpu=on_cpu,
        trains_tower=optimizer is not None and handle.lora is None and not handle.freeze_vision_tower,
        float32_head=strategy.float32_head,
        adapters=handle.lora is not None,
        averaged=_trainable(handle.owner, size) if isinstance(handle, EMA) else 0,
        shares_prefixes=not size.state and not handle.drops_out,
        fused=optimizer is not None and bool(optimizer.keywords.get("fused")),
    )
    return replace(role, moments=role.moments + role.copies) if trained else role


def _kept_by(optimizer: Optimizer) -> int:
    """Number of tensors that an optimizer keeps for each weight, as large as the weight."""
    if optimizer.name in KEPT and not optimizer.arguments and not isinstance(optimizer, GroupedOptimizer):
        return KEPT[optimizer.name]
    small = optimizer.small()
    try:
        small.step()
    except Exception:  # any error of a class that steps only on a GPU; an estimate must not end the run
        return KEPT["adamw"]
    (weight,) = small.param_groups[0]["params"]
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in small.state[weight].values())


def _trainable(handle: ModelHandle, size: ModelSize) -> int:
    whole = size.parameters - (size.tower if handle.freeze_vision_tower else 0)
    return size.adapters(handle.lora.rank) if handle.lora else whole
