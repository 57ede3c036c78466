"""Time that the parts of a step take: pure arithmetic on sizes and hardware, a formula each. Seconds, bytes, FLOP."""

from __future__ import annotations

import math
from dataclasses import replace

from rlflow.memory.role_bytes import LoadedRole
from rlflow.models.sizes import ModelSize
from rlflow.simulate.hardware import Hardware


def forward_flops(size: ModelSize, tokens: float, length: float) -> float:
    """FLOP of a forward pass over `tokens`, in sequences of `length` tokens.

    A multiplication and an addition for each weight and token; the same for each pair of a token and one before it, for
    the scores and again for the values (PaLM, arXiv 2204.02311, appendix B, halved because attention is causal).
    """
    attention = 2 * size.layers * size.heads * size.head_width * length
    return tokens * (2 * size.multiplied + attention)


def gather_seconds(nbytes: float, ranks: int, hardware: Hardware) -> float:
    """Seconds until every rank holds `nbytes` that were in equal parts on all; a reduce-scatter takes as long."""
    return _moving_seconds(nbytes, ranks, hardware) + latency(ranks, hardware)


def _moving_seconds(nbytes: float, ranks: int, hardware: Hardware) -> float:
    """Seconds of a gather's bytes alone.

    Rings through all GPUs: in a node, and between nodes through all their network adapters together. The slower counts.
    """
    in_node = min(ranks, hardware.gpus_per_node)
    nodes = math.ceil(ranks / hardware.gpus_per_node)
    inside = nbytes * (1 - 1 / in_node) / (hardware.node_bandwidth * hardware.link_efficiency)
    across = nbytes * (1 - 1 / nodes) / (in_node * hardware.network_bandwidth * hardware.link_efficiency)
    return max(inside, across)


def latency(ranks: int, hardware: Hardware) -> float:
    """Latency of a collective: a tree's hops in the node, and then between nodes."""
    in_node = min(ranks, hardware.gpus_per_node)
    nodes = math.ceil(ranks / hardware.gpus_per_node)
    return math.log2(in_node) * hardware.node_latency + math.log2(nodes) * hardware.network_latency


def ring_latency(ranks: int, hardware: Hardware) -> float:
    """Latency of a gather by a ring, or of a reduce-scatter: a hop for each rank but one, in a node or to the next.

    NCCL counts them so for its own choice of algorithms (`src/graph/tuning.cc`).
    """
    nodes = math.ceil(ranks / hardware.gpus_per_node)
    return (ranks - nodes) * hardware.node_latency + (nodes - 1) * hardware.network_latency


def all_to_all_seconds(nbytes: float, ranks: int, hardware: Hardware) -> float:
    """Seconds of an exchange in which each rank sends `nbytes`, evenly to the others."""
    if ranks == 1:
        return 0.0
    in_node = min(ranks, hardware.gpus_per_node)
    away = (ranks - in_node) / (ranks - 1)
    inside = nbytes * (1 - away) / (hardware.node_bandwidth * hardware.link_efficiency)
    across = nbytes * away / (hardware.network_bandwidth * hardware.link_efficiency)
    return max(inside, across) + latency(ranks, hardware) + (ranks - 1) * hardware.message_seconds


def decode_seconds(
    role: LoadedRole,
    ranks: int,
    hardware: Hardware,
    *,
    responses: float,
    prompts: float,
    prompt: float,
    response: float,
    longest: float,
    max_num_seqs: float,
) -> float:
    """Seconds that one engine generates, with weights and cache as wide as the role's.

    Prompts first, at the speed of a forward pass. Then one token of each running response a step: a step reads the
    weights, only those experts that a token goes to, and the running responses' caches, or multiplies them, whichever
    is slower; two reductions a layer join the ranks. The engine is never idle while responses wait, and ends with the
    longest.

    Args:
        role: Role that it generates with.
        ranks: GPUs of the engine.
        hardware: Hardware of the GPUs.
        responses: Responses that it generates.
        prompts: Different prompts; the responses to one share its cache.
        prompt: Tokens of a prompt.
        response: Tokens of a response on average.
        longest: Tokens of the longest response.
        max_num_seqs: Most responses that are generated at the same time.
    """
    size, width = role.size, role.width
    flops = forward_flops(size, prompts * prompt, prompt)
    prefill = flops / (ranks * hardware.peak_flops * hardware.forward_efficiency)
    running = min(responses, max_num_seqs)
    steps = max(longest, responses * response / running)
    # On average over the steps, fewer run: the tokens that are to be made, over the steps.
    mean_running = responses * response / steps
    length = prompt + response / 2
    # A state is read and written at each step.
    kept = length * size.cache_bytes(width) + 2 * size.state_bytes
    touched = size.multiplied + size.touched(max(1.0, mean_running)) - size.active  # of all running responses' experts
    read = touched * width + mean_running * kept
    reading = read / (ranks * hardware.memory_bandwidth * hardware.memory_efficiency)
    multiplied = forward_flops(size, mean_running, 2 * length)
    multiplying = multiplied / (ranks * hardware.peak_flops * hardware.forward_efficiency)
    joined = 0.0
    if ranks > 1:
        one = 2 * gather_seconds(mean_running * size.hidden * width, ranks, hardware)
        joined = 2 * size.layers * one
    overhead = responses * hardware.response_seconds
    return prefill + steps * (max(reading, multiplying) + joined + hardware.decode_overhead) + overhead


def score_seconds(role: LoadedRole, tokens: float, length: float, hardware: Hardware) -> float:
    """Seconds of a rank's forward passes over `tokens`; its peers compute their parts of these.

    At ZeRO 3 each micro-batch gathers the weights at the same time.
    """
    computing = _computing(role, tokens, length, 1, hardware, hardware.forward_efficiency)
    micro_batches = _micro_batches(tokens, role)
    return max(computing, micro_batches * _gathers(role, hardware)) + micro_batches * hardware.micro_batch_seconds


def train_seconds(role: LoadedRole, tokens: float, length: float, hardware: Hardware) -> float:
    """Seconds of a rank's updates over `tokens` in all: a backward pass is two forward passes, checkpointing one more.

    Meanwhile each micro-batch gathers the weights twice at ZeRO 3, and its gradients are reduced from ZeRO 2 on; below,
    once an update. Ranks that hold copies of the same part of the weights sum its gradients once an update. Then the
    optimizer reads and writes weights, gradients and moments; what was divided is gathered.
    """
    passes = 4 if role.checkpointing else 3
    computing = _computing(role, tokens, length, passes, hardware, hardware.train_efficiency)
    micro_batches = _micro_batches(tokens / role.updates, role) * role.updates
    reducing = _gathered_seconds(role, role.trained * role.summed_width, role.divided_over, hardware)
    moving = 2 * micro_batches * _gathers(role, hardware)
    moving += reducing * (micro_batches if role.stage >= 2 else role.updates)
    moving += role.updates * _summed_over_copies_seconds(role, hardware)
    own = role.trained / role.states_over
    touched = own * 2 * (role.width + 4 + 4 * role.moments)
    stepping = touched / (hardware.memory_bandwidth * hardware.memory_efficiency)
    if role.weights_over == 1:  # ZeRO 0 gathers the summed gradients, the second half of an all-reduce
        width = role.width if role.stage else role.summed_width
        stepping += _gathered_seconds(role, role.trained * width, role.divided_over, hardware)
    overhead = passes * micro_batches * hardware.micro_batch_seconds + role.updates * hardware.update_seconds
    return max(computing, moving) + role.updates * stepping + overhead


def sync_seconds(role: LoadedRole, hardware: Hardware, crossing: int = 0) -> float:
    """Seconds to send trained weights to the engine: gathered where they are divided, written, and read back.

    Args:
        role: Role with the weights that are sent.
        hardware: Hardware of the ranks.
        crossing: Ranks of a broadcast to engines that live elsewhere: a pipeline, as slow as its slowest link.
    """
    nbytes = role.size.parameters * role.width
    gathering = gather_seconds(nbytes, role.divided_over, hardware) if role.weights_over > 1 else 0.0
    if crossing:
        inside = crossing <= hardware.gpus_per_node
        bandwidth = hardware.node_bandwidth if inside else hardware.network_bandwidth
        gathering += nbytes / (bandwidth * hardware.link_efficiency) + latency(crossing, hardware)
    return gathering + 3 * nbytes / (hardware.memory_bandwidth * hardware.memory_efficiency) + hardware.sync_seconds


def straggling(rows: float, shards: int, variation: float) -> float:
    """The tokens of the fullest of `shards` over the mean, if each shard gets `rows` rows by count.

    The largest of n normal numbers is about sqrt(2 ln n) deviations above their mean.

    Args:
        rows: Independent rows of a shard.
        shards: Number of shards.
        variation: Standard deviation of a row's tokens over their mean.
    """
    return 1 + variation * math.sqrt(2 * math.log(shards) / max(rows, 1.0))


def _computing(
    role: LoadedRole, tokens: float, length: float, passes: int, hardware: Hardware, efficiency: float
) -> float:
    """Seconds of a rank's part of `passes` passes, each as long as a forward pass."""
    flops = passes * forward_flops(role.size, tokens / role.layout.copies, length)
    joining = _divided_seconds(role, tokens, hardware) + _layer_sums(role, tokens, hardware)
    exchanges = max(1, passes - 1)  # a backward pass is two passes, and exchanges once
    joining = passes * joining + exchanges * _exchange_seconds(role, tokens, hardware)
    return flops / (hardware.peak_flops * efficiency) + joining


def _divided_seconds(role: LoadedRole, tokens: float, hardware: Hardware) -> float:
    """Seconds of all-to-alls in a pass over divided sequences: four a layer, of queries, keys, values and results."""
    if (ranks := role.layout.sequence_parallel_size) == 1:
        return 0.0
    heads = (2 * role.size.heads + 2 * role.size.kv_heads) / role.tensor_parallel_size
    nbytes = tokens / ranks * heads * role.size.head_width * role.width * (1 - 1 / ranks)
    rounds = 4 * role.size.layers * _micro_batches(tokens, role)
    starting = all_to_all_seconds(0, ranks, hardware)
    moving = all_to_all_seconds(nbytes, ranks, hardware) - starting
    return role.size.layers * moving + rounds * starting


def _layer_sums(role: LoadedRole, tokens: float, hardware: Hardware) -> float:
    """Seconds of the sums over ranks that divide each layer: two a layer and pass, each as long as two gathers.

    A backward pass counts as two passes, and has two sums a layer; so for it this is an upper bound.
    """
    if (ranks := role.tensor_parallel_size) == 1:
        return 0.0
    nbytes = tokens / role.layout.sequence_parallel_size * role.size.hidden * role.width
    starting, moving = gather_seconds(0, ranks, hardware), _moving_seconds(nbytes, ranks, hardware)
    return 4 * role.size.layers * (moving + _micro_batches(tokens, role) * starting)


def _exchange_seconds(role: LoadedRole, tokens: float, hardware: Hardware) -> float:
    """Seconds to send tokens to their experts and back in a pass: two all-to-alls a layer.

    Experts are taken to get equally many tokens.
    """
    if (ranks := role.expert_parallel_size) == 1:
        return 0.0
    sent = tokens / role.layout.copies * role.size.experts_per_token
    nbytes = sent * role.size.hidden * role.width * (1 - 1 / ranks)
    starting = all_to_all_seconds(0, ranks, hardware)
    moving = all_to_all_seconds(nbytes, ranks, hardware) - starting
    return 2 * role.size.layers * (moving + _micro_batches(tokens, role) * starting)


def _gathers(role: LoadedRole, hardware: Hardware) -> float:
    return _gathered_seconds(role, role.size.parameters * role.width, role.gathered_over, hardware)


def _gathered_seconds(role: LoadedRole, nbytes: float, ranks: int, hardware: Hardware) -> float:
    """Seconds to gather or reduce this rank's part of `nbytes`, layer by layer.

    Ranks with parts of the same share are `ranks // over` apart, so a node has fewer of them.
    """
    seconds = 0.0
    for share, over in role.shares(ranks):
        apart = replace(hardware, gpus_per_node=max(1, hardware.gpus_per_node * over // ranks))
        seconds += _moving_seconds(nbytes * share, over, apart) + role.size.layers * ring_latency(over, apart)
    return seconds


def _summed_over_copies_seconds(role: LoadedRole, hardware: Hardware) -> float:
    """Seconds of an all-reduce of a rank's gradients over those that hold the same part of the weights, by a ring.

    Copies are taken to be on different nodes, and each GPU to have a network adapter of its own.
    """
    copies = len(role.layout.ranks) // role.divided_over
    if role.stage < 3 or copies == 1:
        return 0.0
    nbytes = role.trained * role.summed_width / role.divided_over * (1 - 1 / copies)
    moving = nbytes / (hardware.network_bandwidth * hardware.link_efficiency)
    return 2 * (moving + (copies - 1) * hardware.network_latency)


def _micro_batches(tokens: float, role: LoadedRole) -> int:
    return max(1, math.ceil(tokens / role.token_budget))
