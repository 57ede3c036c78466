"""Each formula against a number worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.errors import UserError
from rlflow.memory.role_bytes import LoadedRole
from rlflow.models.sizes import KNOWN, ModelSize, size_of
from rlflow.simulate.costs import (
    all_to_all_seconds,
    decode_seconds,
    forward_flops,
    gather_seconds,
    ring_latency,
    score_seconds,
    straggling,
    sync_seconds,
    train_seconds,
)
from rlflow.simulate.designs import WorkItem, node_seconds, scheduled
from rlflow.simulate.hardware import Hardware, read_hardware
from rlflow.values.layout import Layout

# Round numbers: 1 GFLOP/s, 1 MB/s of memory, 1 MB/s in a node of 4, 0.5 MB/s between nodes, all of it reached.
PLAIN = Hardware(1e9, 1e9, 1e6, 1e6, 0.5e6, 4, 1e-3, 2e-3, 1e-4, 1.0, 1.0, 1.0, 1.0, 1e-9, 1e-3, 1e6, 1e-6)
# Per layer: queries and output 2 x 10 x 10, keys and values 2 x 10 x 5, feed-forward 3 x 10 x 20, norms 20: 920.
# Two layers, a norm of 10, embeddings 2 x 100 x 10: 1,840 + 10 + 2,000 = 3,850, of which 1,000 are looked up.
SMALL = ModelSize(hidden=10, intermediate=20, layers=2, heads=2, kv_heads=1, vocabulary=100)
ZERO3 = LoadedRole(SMALL, Layout((0, 1, 2, 3), 4), 3, 4, 2, 3850, 3, False, 2, 500)
PAIRS = Layout((0, 1, 2, 3), 2)  # two ranks hold the same rows


def test_parameters_and_bytes_of_the_cache_are_counted() -> None:
    assert (SMALL.parameters, SMALL.multiplied) == (3850, 2850)
    assert SMALL.cache_bytes(2) == 2 * 2 * 5 * 2  # keys and values, layers, width, bytes


def test_a_model_of_one_label_has_an_output_layer_of_its_own() -> None:
    # Tied or not: 1,000 looked up, 1,850 of layers and norm, and 10 of the output layer, multiplied with them.
    for size in (SMALL, replace(SMALL, tied=True)):
        scalar = size.with_labels(1)
        assert (scalar.parameters, scalar.multiplied, scalar.outputs) == (2860, 1860, 1)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),  # as their pages at huggingface.co say
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_known_models_have_as_many_parameters_as_published(model: str, parameters: int) -> None:
    assert KNOWN[model].parameters == parameters


def test_the_size_of_a_folder_is_that_of_its_config(tmp_path: Path) -> None:
    from rlflow.models.tiny import write_tiny_model

    assert size_of(str(write_tiny_model(tmp_path / "model"))) == replace(KNOWN["tiny"], head_dim=None)
    assert size_of(str(tmp_path)) == size_of(str(tmp_path / "model"))  # the folder of a run


def test_a_folder_whose_config_says_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(UserError, match="whose config does not say 'intermediate_size'"):
        size_of(str(tmp_path))


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_a_mixture_of_experts_is_not_taken_for_a_dense_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, name: 4}))
    with pytest.raises(UserError, match=r"a mixture of experts .* whose size is not known"):
        size_of(str(tmp_path))


def test_a_forward_pass_multiplies_weights_and_pairs_of_tokens() -> None:
    # 8 tokens x (2 x 2,850 + 2 x 2 layers x 10 x length 4)
    assert forward_flops(SMALL, 8, 4) == 8 * (5700 + 160)


def test_gathering_is_as_slow_as_the_slower_of_node_and_network() -> None:
    # In a node of 4: 3/4 of 1 MB at 1 MB/s, and two hops of 1 ms.
    assert gather_seconds(1e6, 4, PLAIN) == pytest.approx(0.75 + 0.002)
    # 4 nodes: between them 3/4 of it over 4 adapters of 0.5 MB/s, 0.375 s; the node's 0.75 s count. Hops 2 + 2.
    assert gather_seconds(1e6, 16, PLAIN) == pytest.approx(0.75 + 0.002 + 0.004)
    assert gather_seconds(1e6, 1, PLAIN) == 0


def test_a_ring_has_a_hop_for_each_rank_but_one() -> None:
    # 16 ranks in 4 nodes of 4: 15 hops, 3 of them from node to node.
    assert ring_latency(16, PLAIN) == pytest.approx(12 * 0.001 + 3 * 0.002)
    assert ring_latency(1, PLAIN) == 0


def test_ranks_with_copies_of_weights_sum_their_gradients_once_an_update() -> None:
    fast = replace(PLAIN, peak_flops=1e15, memory_bandwidth=1e15)
    copies = replace(ZERO3, layout=Layout(tuple(range(8)), 8))  # divided over 4 ranks, so 2 copies, on 2 nodes
    # Twice: half of a rank's 3,850 float32 bytes at 0.5 MB/s, and a hop between nodes; for each of 2 updates.
    more = train_seconds(copies, 1000, 4, fast) - train_seconds(ZERO3, 1000, 4, fast)
    assert more == pytest.approx(2 * 2 * (0.00385 + 0.002), rel=1e-4)


def test_an_exchange_is_as_slow_as_what_leaves_the_node() -> None:
    # 8 ranks in 2 nodes: 4/7 of 0.7 MB at 0.5 MB/s; hops 2 ms + 2 ms; 7 messages of 0.1 ms.
    assert all_to_all_seconds(0.7e6, 8, PLAIN) == pytest.approx(0.8 + 0.004 + 0.0007)


def test_decoding_reads_weights_and_caches_at_every_step() -> None:
    seconds = decode_seconds(
        ZERO3, 1, PLAIN, responses=4, prompts=2, prompt=10, response=20, longest=20, max_num_seqs=2
    )
    # Two at once: 4 x 20 / 2 = 40 steps. A step reads 2,850 x 2 bytes, and 2 caches of 10 + 20 / 2 tokens of 40 bytes:
    # 7,300 bytes at 1 MB/s. Prompts: 2 x 10 tokens x (5,700 + 400) FLOP at 1 GFLOP/s.
    assert seconds == pytest.approx(40 * 0.0073 + 20 * 6100e-9, rel=1e-5)


def test_decoding_reads_the_experts_of_all_running_responses() -> None:
    size = replace(SMALL, experts=4, experts_per_token=2)
    sparse, lengths = replace(ZERO3, size=size), {"prompt": 10, "response": 20, "longest": 20}
    seconds = decode_seconds(sparse, 1, PLAIN, responses=4, prompts=2, max_num_seqs=2, **lengths)
    # Of 4 experts of 600 parameters in each of two layers, two responses miss 4 / 2 / 2 = 1, and one misses 2.
    read = 2 * (size.multiplied + 2 * 600) + 1600
    assert seconds == pytest.approx(40 * read / 1e6 + 20 * (2 * size.multiplied + 400) / 1e9, rel=1e-5)


def test_decoding_ends_with_the_longest_response() -> None:
    seconds = decode_seconds(
        ZERO3, 1, PLAIN, responses=1, prompts=1, prompt=10, response=20, longest=80, max_num_seqs=2
    )
    # 80 steps, in which a quarter of a response runs on average: 5,700 + 0.25 x 20 x 40 = 5,900 bytes.
    assert seconds == pytest.approx(80 * 0.0059 + 10 * 6100e-9, rel=1e-5)


def test_scoring_at_zero_3_waits_for_the_weights_of_each_micro_batch() -> None:
    # 1,000 tokens are 2 micro-batches; each gathers 3,850 x 2 bytes: 3/4 at 1 MB/s, and 3 hops of 1 ms for each of two
    # layers. Computing takes 6 ms.
    assert score_seconds(ZERO3, 1000, 4, PLAIN) == pytest.approx(2 * (0.0057750 + 0.006))
    assert score_seconds(replace(ZERO3, stage=2), 1000, 4, PLAIN) == pytest.approx(1000 * 5860e-9)


def test_training_is_three_forward_passes_and_four_with_checkpointing() -> None:
    fast = replace(PLAIN, node_bandwidth=1e15, network_bandwidth=1e15, node_latency=1e-12, memory_bandwidth=1e15)
    seconds = train_seconds(ZERO3, 1000, 4, fast)
    assert seconds == pytest.approx(3 * 1000 * 5860e-9, rel=1e-4)
    again = train_seconds(replace(ZERO3, checkpointing=True), 1000, 4, fast)
    assert again == pytest.approx(4 * 1000 * 5860e-9, rel=1e-4)


def test_training_at_zero_3_moves_weights_twice_and_gradients_once_a_micro_batch() -> None:
    fast = replace(PLAIN, peak_flops=1e15, memory_bandwidth=1e15)
    # 2 updates of 500 tokens, a micro-batch each: 7,700 bytes of weights twice, and 15,400 of float32 gradients.
    weights, gradients = 0.011775, 0.01155 + 0.006
    assert train_seconds(ZERO3, 1000, 4, fast) == pytest.approx(2 * (2 * weights + gradients), rel=1e-4)
    # ZeRO 1 reduces once an update, and gathers the weights after it; ZeRO 0 gathers the gradients.
    for stage, gathered in ((1, weights), (0, gradients)):
        once = replace(ZERO3, stage=stage, token_budget=50)
        assert train_seconds(once, 1000, 4, fast) == pytest.approx(2 * (gradients + gathered), rel=1e-4)


def test_weights_are_gathered_written_and_read_back() -> None:
    assert sync_seconds(ZERO3, PLAIN) == pytest.approx(0.007775 + 3 * 0.0077)
    assert sync_seconds(replace(ZERO3, stage=2), PLAIN) == pytest.approx(3 * 0.0077)


def test_the_fullest_of_many_shards_has_more_than_the_mean() -> None:
    assert straggling(100, 1, 0.5) == 1
    assert straggling(100, 1024, 0.5) == pytest.approx(1 + 0.5 * (2 * 6.93147 / 100) ** 0.5)


def test_work_waits_for_its_lane_and_for_what_it_needs() -> None:
    timeline = scheduled(
        [
            WorkItem("a", "rollout", ("ranks",), 3.0),
            WorkItem("move", "exchange", ("links",), 5.0, ("a",)),
            WorkItem("b", "host", ("ranks",), 1.0),
            WorkItem("c", "train", ("ranks",), 2.0, ("move",)),
        ]
    )
    assert {name: work.start for name, work in timeline.works.items()} == {"a": 0, "move": 3, "b": 3, "c": 8}
    assert [work.name for work in timeline.critical_path()] == ["a", "move", "c"]
    assert timeline.seconds == 10


def test_a_node_s_seconds_are_those_of_all_draws_and_a_sync_s_those_of_all_policies() -> None:
    works = [("sync actor", "sync", 1.0), ("sync judge", "sync", 2.0), ("rollout", "rollout", 3.0)]
    works += [("rollout (2)", "rollout", 4.0), ("rollout -> rewards", "exchange", 5.0)]
    assert node_seconds(WorkItem(name, kind, (), seconds) for name, kind, seconds in works) == {"sync": 3, "rollout": 7}


def test_a_file_says_what_differs_from_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("like: h100\nmemory: 96.0e+9\n")
    assert read_hardware(str(tmp_path / "mine.yaml")) == replace(read_hardware("h100"), memory=96e9)


def test_peers_divide_a_sequence_s_compute_with_four_all_to_alls_a_layer() -> None:
    whole = score_seconds(replace(ZERO3, stage=0), 400, 100, PLAIN)
    divided = score_seconds(replace(ZERO3, stage=0, layout=PAIRS), 400, 100, PLAIN)
    # 200 tokens of 2 x 2 query and output heads' and 2 key and value heads' 5 numbers of 2 bytes, half of them away:
    # 200 x 6 x 5 x 2 / 2 = 6,000 bytes a layer at 1 MB/s; 4 x 2 all-to-alls with a hop of 1 ms and a message of 0.1 ms.
    told = 2 * 6e3 / 1e6 + 8 * (1e-3 + 1e-4)
    assert divided == pytest.approx(whole / 2 + told)


def test_peers_divide_activations_and_a_row_above_the_budget_stands_alone() -> None:
    assert replace(ZERO3, layout=PAIRS).activations == ZERO3.activations / 2
    assert replace(ZERO3, longest=1000).activations == 2 * ZERO3.activations  # the budget is 500


def test_ranks_of_a_layer_divide_its_compute_with_two_sums_a_layer() -> None:
    layer = Layout((0, 1, 2, 3), 2, tensor_parallel_size=2)
    whole = score_seconds(replace(ZERO3, stage=0), 400, 100, PLAIN)
    divided = score_seconds(replace(ZERO3, stage=0, layout=layer), 400, 100, PLAIN)
    # 400 tokens of 10 numbers of 2 bytes, half of them away, at 1 MB/s, and a hop of 1 ms: a sum is two such gathers.
    assert divided == pytest.approx(whole / 2 + 2 * 2 * 2 * (400 * 10 * 2 / 2 / 1e6 + 1e-3))


def test_ranks_of_a_layer_divide_what_is_gathered_and_what_is_within_the_layer() -> None:
    layer = replace(ZERO3, layout=Layout((0, 1, 2, 3), 2, tensor_parallel_size=2), masters=True)
    whole = replace(ZERO3, masters=True)
    # Norms in float32 and 16 bits whole, and halves of queries, keys, values and feed-forward; then a backward pass's
    assert layer.activations == 500 * (2 * (2 * (40 + 40) + 2 * (30 + 80) / 2) + 2 * (40 / 2 + 10))
    assert (layer.gathered, layer.reduced) == (whole.gathered / 2, whole.reduced / 2)
    assert layer.logits(80e9) == whole.logits(80e9) / 2
    assert (layer.weights, layer.optimizer) == (whole.weights, whole.optimizer)  # all four ranks divide these


def test_ranks_of_a_layer_gather_its_weights_from_those_that_have_the_same_part() -> None:
    layer = replace(ZERO3, layout=Layout((0, 1, 2, 3), 2, tensor_parallel_size=2), masters=True)
    assert layer.shares(4) == [(1 / 2, 2)]
    assert replace(layer, layout=Layout((0, 1, 2, 3), 1, tensor_parallel_size=4)).shares(4) == [(1 / 4, 1)]


def test_ranks_with_the_same_part_of_a_layer_are_on_as_many_nodes() -> None:
    layer = replace(ZERO3, layout=Layout(tuple(range(16)), 4, tensor_parallel_size=4), divided_over=16)
    fast = replace(PLAIN, peak_flops=1e15, node_bandwidth=1e15, node_latency=1e-12)
    # Ranks 0, 4, 8 and 12 gather a quarter of 7,700 bytes: 3/4 at 0.5 MB/s, and 3 hops of 2 ms for each of two layers.
    assert score_seconds(layer, 1, 4, fast) == pytest.approx(1925 * 0.75 / 0.5e6 + 2 * 3 * 2e-3)


def test_ranks_that_divide_experts_hold_a_share_and_exchange_twice_a_layer() -> None:
    sparse = replace(ZERO3, size=replace(ZERO3.size, experts=4, experts_per_token=2), masters=True)
    ranks = (0, 1, 2, 3)
    divided = replace(sparse, layout=Layout(ranks, 2, tensor_parallel_size=2, expert_parallel_size=4))
    experts = sparse.size.layers * 4 * 3 * sparse.size.hidden * sparse.size.intermediate / sparse.size.parameters
    assert divided.shares(4) == [(pytest.approx((1 - experts) / 2), 2), (pytest.approx(experts / 4), 1)]
    assert divided.weights == sparse.weights  # all four ranks divide them either way
    of_experts = 4 * 3 * sparse.size.hidden * sparse.size.intermediate
    layer = (sparse.size.layer - of_experts) / 2 + of_experts / 4
    assert divided.gathered == pytest.approx(2 * max(layer, sparse.size.embedding / 2) * 2)
    whole = score_seconds(replace(sparse, stage=0), 400, 100, PLAIN)
    exchanging = replace(sparse, stage=0, layout=Layout(ranks, 4, expert_parallel_size=2))
    # 400 tokens to 2 experts each, 10 numbers of 2 bytes, half of them away.
    one = all_to_all_seconds(400 * 2 * 10 * 2 / 2, 2, PLAIN)
    assert score_seconds(exchanging, 400, 100, PLAIN) == pytest.approx(whole + 2 * 2 * one)


def test_weights_for_engines_elsewhere_cross_a_link_once() -> None:
    role = replace(ZERO3, stage=2)
    here, across = (sync_seconds(role, PLAIN, crossing=of) for of in (0, 2))
    assert across - here == pytest.approx(3850 * 2 / 1e6 + 1e-3)  # in a node: 1 MB/s and a hop
    assert sync_seconds(role, PLAIN, crossing=8) - here == pytest.approx(3850 * 2 / 0.5e6 + 4e-3)
