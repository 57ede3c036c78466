"""Bytes of a rank: by hand, and counted in the processes of a real DeepSpeed."""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from rlflow.memory.estimate import Memory, does_not_fit, memory_lines
from rlflow.memory.role_bytes import LoadedRole, loaded_role
from rlflow.memory.workload import Engine, loaded_engine
from rlflow.models.causal_lm import CausalLM, ScoringModel
from rlflow.models.handle import ForwardPlan
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import GroupedOptimizer, Optimizer
from rlflow.models.packing import pack
from rlflow.models.scalar import ValueModel
from rlflow.models.sizes import ModelSize, size_of
from rlflow.models.tiny import write_tiny_model
from rlflow.rollout.engine import EngineMemory, RolloutEngine
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine
from rlflow.strategies import FSDPStrategy, TrainingStrategy
from rlflow.strategies.deepspeed import DeepSpeedStrategy
from rlflow.strategies.single import SingleProcess
from rlflow.values.layout import Layout
from tests.families.towers import TOWERS, noise, rows_of, write_tower
from tests.prefix_rows import rows_alike
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage, backward, launch, trained

# 3,850 parameters, of which 1,000 are the embedding
SMALL = ModelSize(hidden=10, intermediate=20, layers=2, heads=2, kv_heads=1, vocabulary=100)
FOUR = Layout((0, 1, 2, 3), 4)
ZERO3 = LoadedRole(SMALL, FOUR, 3, 4, 2, 3850, 3, False, 2, 500)
CHUNK = 2 * 4 * 500 * 100  # of logits: with the gradient, float32, tokens, vocabulary
# Activations of a token. A layer keeps 10 numbers in float32 and 20 in 16 bits for each of two norms; 10 of queries, 5
# of keys, 5 of values, 10 of attention's result and 80 of the feed-forward network. A backward pass adds 40 and 10.
LAYER, GRADIENTS = 2 * (40 + 40) + 2 * (30 + 80), 2 * (40 + 10)
ZERO3_KEPT, ZERO3_CHECKPOINTED = 500 * (2 * LAYER + GRADIENTS), 500 * (2 * 10 * 2 + LAYER + GRADIENTS)
# Prefixes of transformers' class names; hidden size, width of the feed-forward network, heads, heads of keys and their
# width, the first four in the proportions of the model and smaller; and what its configuration says in addition.
LAYERS: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "Cohere 2 7B": ("Cohere2", (1024, 3584, 8, 2, 128), {}),
    "Gemma 2 9B": ("Gemma2", (896, 3584, 4, 2, 256), {}),
    "Gemma 3 1B": ("Gemma3Text", (576, 3456, 2, 1, 256), {}),
    "Gemma 3 4B": ("Gemma3Text", (640, 2560, 2, 1, 256), {}),
    "GLM-4 9B": ("Glm4", (1024, 3424, 8, 2, 128), {}),
    "GPT-NeoX 20B": ("GPTNeoX", (768, 3072, 8, 8, 96), {}),
    "GPT-OSS 20B": ("GptOss", (720, 720, 16, 2, 64), {"num_local_experts": 8, "num_experts_per_tok": 4}),
    "Llama 3.1 8B": ("Llama", (1024, 3584, 8, 2, 128), {}),
    "Mixtral 8x7B": ("Mixtral", (1024, 3584, 8, 2, 128), {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMo 2 7B": ("Olmo2", (512, 1376, 4, 4, 128), {}),
    "Phi 3 mini": ("Phi3", (768, 2048, 8, 8, 96), {}),
    "Qwen2.5 7B": ("Qwen2", (896, 4736, 7, 1, 128), {}),
    "Qwen3 0.6B": ("Qwen3", (512, 1536, 8, 4, 128), {}),
    "Qwen3 8B": ("Qwen3", (1024, 3072, 8, 2, 128), {}),
    "Qwen3 30B-A3B": (
        "Qwen3Moe",
        (512, 1536, 8, 1, 128),
        {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 8},
    ),
    "StarCoder2 3B": ("Starcoder2", (768, 3072, 6, 2, 128), {}),
}
# Two ranks that sum their gradients whole; two layers, 50 tokens of width 10, a vocabulary of 100
ACTOR = LoadedRole(SMALL, Layout((0, 1), 2), 0, 2, 2, 3850, 2, False, 1, 50, offloaded=True)
FROZEN = replace(ACTOR, trained=0, moments=0)


def engine(weights: float, cache: float, asleep: Literal["nothing", "weights", "weights and cache"]) -> Engine:
    return Engine(1, (0,), weights, EngineMemory(1, cache=cache, asleep=asleep))


def busy(**engines: Engine) -> Memory:
    return Memory((0,), {"actor": ACTOR, "reference": FROZEN}, engines, held=1000, capacity=40_000)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 7700, 23100, 46200), (1, 7700, 23100, 11550), (2, 7700, 3850, 11550), (3, 1925, 3850, 11550)],
)
def test_zero_divides_optimizer_then_gradients_then_weights(
    stage: int, weights: float, gradients: float, optimizer: float
) -> None:
    # Three float32 numbers of each weight are the optimizer's; before ZeRO-2 gradients are in bfloat16, and in float32.
    how = replace(ZERO3, stage=stage)
    assert (how.weights, how.gradients, how.optimizer) == (weights, gradients, optimizer)


def test_checkpointing_keeps_inputs_of_layers_and_one_layer() -> None:
    assert ZERO3.activations == ZERO3_KEPT
    assert replace(ZERO3, checkpointing=True).activations == ZERO3_CHECKPOINTED


def test_a_backward_pass_adds_gradients_of_experts_results_where_experts_are_narrow() -> None:
    # Of a token: two experts' inner vectors with a gate, 2 * 2 * 20, or three times the results of two, 3 * 2 * 10.
    wide = replace(SMALL, experts=4, experts_per_token=2)
    narrow = replace(wide, intermediate=5)
    for size, inner, gradients in ((wide, 20, 80), (narrow, 5, 60)):
        layer = 2 * (40 + 40) + 2 * (30 + 2 * 4 * inner + 2 * 2 * 10)
        assert replace(ZERO3, size=size).activations == 500 * (2 * layer + 2 * (gradients + 10))


def test_a_micro_batch_of_pictures_counts_what_a_trained_tower_keeps() -> None:
    # 500 tokens are 100 of pictures with 4 patches each, of which the tower keeps 600 numbers of 2 bytes.
    size = replace(SMALL, patches=4, tower_width=30, tower_kept=600)
    how, of_decoder = replace(ZERO3, size=size, trains_tower=True), ZERO3_KEPT
    assert how.activations == of_decoder / 5 + 400 * 600 * 2
    assert replace(how, trains_tower=False).activations == of_decoder
    checkpointed = replace(how, checkpointing=True, size=replace(size, tower_width=3000))
    assert checkpointed.activations == ZERO3_CHECKPOINTED / 5 + 400 * 3000 * 2
    assert replace(how, size=replace(size, tower_kept=1)).activations == of_decoder  # of text alone


def bytes_kept(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that a forward pass keeps for its backward pass, without the model's weights."""
    storages: dict[int, int] = {}
    alive: list[torch.Tensor] = []
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(storages.values())


@pytest.mark.parametrize(
    "name", slow_but(["Gemma 3 1B", "OLMo 2 7B", "Qwen3 0.6B", "Qwen3 30B-A3B", "StarCoder2 3B"], LAYERS)
)
def test_a_layer_keeps_for_its_backward_pass_what_the_table_counts(name: str, tmp_path: Path) -> None:
    prefix, (hidden, intermediate, heads, kv_heads, head_dim), settings = LAYERS[name]
    # Attention on the CPU writes out capped scores, and scores with sinks, which a GPU does not keep: rows are short.
    line = pack(rows_alike(2, 3, 64))
    kept, counted = [], []
    for layers in (1, 2):
        config = getattr(transformers, f"{prefix}Config")(
            **{"intermediate_size": intermediate} | settings,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=128,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=1,
        )
        config.save_pretrained(tmp_path)
        with torch.random.fork_rng(devices=[]):
            model = ScoringModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
        kept.append(bytes_kept(model, partial(model, *line.arguments())))
        role = replace(ZERO3, size=size_of(str(tmp_path)), layout=Layout((0,), 1), token_budget=line.input_ids.numel())
        counted.append(role.activations)
    assert kept[1] - kept[0] == pytest.approx(counted[1] - counted[0], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_what_a_tower_keeps_for_its_backward_pass_is_what_the_table_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, text, tower = TOWERS[name]
    layers = {"depth": 6, "num_heads": 4} if "depth" in tower else {"num_hidden_layers": 6, "num_attention_heads": 4}
    wide = {**tower, **layers, "hidden_size": 256, "intermediate_size": 1024}
    if "fullatt_block_indexes" in tower:
        wide["fullatt_block_indexes"] = [5]
    monkeypatch.setitem(TOWERS, name, (prefix, text, wide))
    folder = write_tower(name, tmp_path / "model")
    processor, picture = rows_of(folder).processor, noise(9, 224, 224)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    found = bytes_kept(model, lambda: model.model.get_image_features(**processor.inputs([picture])))
    counted = size_of(str(folder)).tower_kept * processor.patches(picture) * 4
    assert found == pytest.approx(counted, rel=0.15)


def kept(folder: Path, samples: int, shares: bool) -> tuple[int, int, float]:
    """For samples of 12 tokens to one prompt of 400: tokens of their line; bytes that a forward pass keeps for its
    backward pass; and bytes of activations in the table, at the smallest budget that makes one micro-batch of them.
    """
    rows = rows_alike(400, 12, samples)
    handle = CausalLM(str(folder), optimizer=Optimizer())
    model = handle.load(folder, torch.float32, torch.device("cpu"))

    def is_one(budget: int) -> bool:
        handle.attach(model, ForwardPlan(budget, share_prefixes=shares))
        return len(handle.plan.micro_batches(rows)) == 1

    budget = bisect.bisect_left(range(2 * samples * 412), True, lo=1, key=is_one)
    assert is_one(budget)
    with handle.training():
        found = bytes_kept(model, lambda: handle.logprobs(rows))
    strategy = SingleProcess(token_budget=budget)
    role = loaded_role(handle, size_of(str(folder)), strategy, Layout((0,), 1), samples=samples)
    return handle.plan.model_input(rows).useful_tokens, found, role.activations


def test_the_table_counts_the_keys_that_rows_of_one_prompt_gather(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=768, layers=4, heads=8, kv_heads=4)
    tokens_whole, whole, whole_counted = kept(folder, 4, shares=False)
    tokens, shared, counted = kept(folder, 32, shares=True)
    # A token of the line keeps what one of whole rows does. In addition, of each of the 411 tokens of each row that are
    # fed, a layer keeps a key and a value of 4 heads of width 32, in float32.
    gathered = 4 * 32 * 411 * 2 * 4 * 32 * 4
    assert shared == pytest.approx(tokens * whole / tokens_whole + gathered, rel=0.02)
    assert shared / counted < whole / whole_counted


def test_zero_3_holds_the_largest_piece_whole() -> None:
    assert replace(ZERO3, max_live_parameters=10).gathered == 1000 * 2  # an embedding; a layer has 920
    assert replace(ZERO3, max_live_parameters=2500).gathered == 2500 * 2  # or as many as may stay
    assert replace(ZERO3, stage=2).gathered == 0
    assert replace(ZERO3, max_live_parameters=1500).gathered == 1500 * 2
    assert replace(ZERO3, max_live_parameters=10**9).gathered == 3850 * 2  # there are no more


def test_settings_of_zero_3_say_where_weights_lie_and_how_many_are_on_their_way() -> None:
    handle = CausalLM("tiny", optimizer=Optimizer())

    def how(**settings: Any) -> LoadedRole:
        return loaded_role(handle, SMALL, DeepSpeedStrategy(3, **settings), FOUR, samples=8)

    assert how(reduce_bucket_size=800).reduce_bucket_size == 800
    assert how().reduce_bucket_size == 1000  # no more than the largest layer, the embedding
    assert how().weights == 3850 * 4 / 4
    assert how(hpz_partition_size=2).weights == 3850 * 4 / 4 + 3850 * 4 / 2
    assert how(hpz_partition_size=4).weights == 3850 * 4 / 4  # the role has no more ranks
    assert how(offload_param=True).weights_offloaded


def test_zero_0_flattens_a_bucket_of_gradients_to_sum_them_in_float32() -> None:
    assert replace(ZERO3, stage=0).reduced == 3850 * (2 + 4)
    assert replace(ZERO3, stage=0, trained=10**9).reduced == (500_000_000 + 1000) * (2 + 4)


def test_fsdp_holds_a_layer_and_the_next_one_whole() -> None:
    assert replace(ZERO3, masters=True).gathered == 2 * 1000 * 2


def test_a_second_copy_of_weights_within_a_node_is_counted() -> None:
    # 2 bytes each, divided over 8 ranks, and again over 4
    assert replace(ZERO3, divided_over=8, hpz_partition_size=4).weights == 3850 * 2 / 8 + 3850 * 2 / 4


def test_a_moving_average_is_counted_in_addition_to_narrower_weights() -> None:
    teacher = CausalLM("tiny").averaged(0.9)

    def how(strategy: TrainingStrategy) -> LoadedRole:
        return loaded_role(teacher, SMALL, strategy, Layout((0, 1), 2), samples=8)

    assert how(DeepSpeedStrategy(2)).averaged_width == 0  # the weights are the average
    assert how(FSDPStrategy("bf16")).averaged_width == 2  # weights are float32, and read in 16 bits
    assert how(DeepSpeedStrategy(2, "bf16")).weights == 3850 * 2 + 3850 * 4 / 2  # whole, and divided


def test_logits_of_a_small_vocabulary_are_less_than_a_chunk() -> None:
    assert replace(ZERO3, trained=0).logits(80e9) == CHUNK
    large = replace(ZERO3, size=replace(SMALL, vocabulary=150_000), token_budget=4096, trained=0)
    assert large.logits(80e9) == 2 * 256 * 2**20
    assert replace(large, on_cpu=False).logits(80 * 2**30) == 2 * 2**30


def test_in_addition_to_logits_the_output_layer_s_float32_gradient_is_counted() -> None:
    # Of its 1,000 weights; in 16 bits also a chunk's, or with `float32_head` the weights once more
    assert ZERO3.logits(80e9) == CHUNK + 1000 * (4 + 2)
    assert replace(ZERO3, width=4).logits(80e9) == CHUNK + 1000 * 4
    assert replace(ZERO3, float32_head=True).logits(80e9) == CHUNK + 1000 * (4 + 4)
    assert replace(ZERO3, trained=100).logits(80e9) == CHUNK  # of adapters
    assert replace(ZERO3, trained=100, float32_head=True).logits(80e9) == CHUNK + 1000 * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def storages() -> dict[int, torch.Tensor]:
    """A tensor of each piece of memory that this process has in tensors, by its address."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def counted_bytes(folder: Path, stage: Stage, precision: str, offload: bool) -> tuple[int, float]:
    """Bytes of two updates' tensors on this rank before the second step: counted, and as computed."""
    strategy = launch(stage, precision, **({"offload_optimizer": True} if offload else {}))
    before = storages()  # kept, so that no address is given anew
    handle = trained(folder, Optimizer())
    strategy.setup_role("actor", handle, folder, 2)
    backward(strategy, "actor", handle)
    strategy.step("actor")
    backward(strategy, "actor", handle)
    time.sleep(0.2)  # threads of gloo hold for a moment what they have sent
    new = [tensor.untyped_storage().nbytes() for address, tensor in storages().items() if address not in before]
    role = loaded_role(handle, size_of(str(folder)), strategy, Layout((0, 1), 2), samples=8)
    # The others are gone after the backward pass.
    buffers = role.reduce_bucket_size * role.summed_width if stage == 3 else 0.0
    return sum(new), role.weights_here + role.gradients_here + role.states_here + role.in_host_memory + buffers


@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [
        (3, "bf16", False),
        pytest.param("fsdp", "bf16", False, marks=pytest.mark.slow),
        pytest.param(0, "fp32", False, marks=pytest.mark.slow),
        pytest.param(2, "fp32", False, marks=pytest.mark.slow),
        pytest.param(2, "bf16", False, marks=pytest.mark.slow),
        pytest.param(2, "bf16", True, marks=pytest.mark.slow),
        pytest.param(3, "fp32", False, marks=pytest.mark.slow),
        pytest.param(3, "bf16", True, marks=pytest.mark.slow),
        pytest.param("fsdp", "fp32", False, marks=pytest.mark.slow),
    ],
)
def test_a_role_takes_as_many_bytes_as_computed(
    stage: Stage, precision: str, offload: bool, tiny: Path, ranks2: RankPool
) -> None:
    for counted, computed in ranks2.run(counted_bytes, tiny, stage, precision, offload):
        # DeepSpeed keeps one of the weights twice, and small ones whole.
        assert counted == pytest.approx(computed, rel=0.1)


def test_a_critic_is_as_large_as_a_classifier_of_one_label(tiny: Path) -> None:
    handle = ValueModel(str(tiny))
    size = loaded_role(handle, size_of(str(tiny)), SingleProcess(), Layout((0,), 1), samples=8).size
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    assert size.parameters == sum(parameter.numel() for parameter in classifier.parameters())
    assert replace(ZERO3, size=size, trained=0).logits(80e9) == 2 * 4 * 500  # with the gradient, of each token


@pytest.mark.parametrize(("dropout", "state", "shares"), [(0.0, 0, True), (0.1, 0, False), (0.0, 1, False)])
def test_rows_with_dropout_or_a_state_share_no_prefix(dropout: float, state: int, shares: bool) -> None:
    handle = CausalLM("tiny", optimizer=Optimizer(), lora=LoRA(dropout=dropout))
    size = replace(SMALL, state=state)
    assert loaded_role(handle, size, SingleProcess(), Layout((0,), 1), samples=8).shares_prefixes is shares


def test_one_process_keeps_all_in_the_dtype_of_the_weights() -> None:
    handle = CausalLM("tiny", optimizer=Optimizer())
    found = loaded_role(handle, SMALL, SingleProcess("bf16"), Layout((0,), 1), samples=8)
    assert (found.weights, found.gradients, found.optimizer) == (7700, 7700, 15400)


@pytest.mark.parametrize(
    ("optimizer", "moments", "root"),
    [
        (Optimizer(), 2, False),  # fused
        (Optimizer(arguments={"amsgrad": True}), 3, False),
        (Optimizer(arguments={"foreach": True}), 2, True),
        (Optimizer("torch.optim.Adam"), 2, True),
        (Optimizer("torch.optim.NAdam", arguments={"capturable": True}), 2, True),  # which does not step on a CPU
        (Optimizer("sgd"), 0, False),
        (Optimizer("sgd", arguments={"momentum": 0.9}), 1, False),
        (GroupedOptimizer("sgd", given=torch.optim.SGD([torch.ones(1)], momentum=0.9)), 1, False),
    ],
)
def test_what_an_optimizer_keeps_for_each_weight_is_measured(optimizer: Optimizer, moments: int, root: bool) -> None:
    handle = CausalLM("tiny", optimizer=optimizer)
    alone = loaded_role(handle, SMALL, SingleProcess("bf16"), Layout((0,), 1), samples=8)
    assert (alone.moments, alone.copies) == (moments, False)
    divided = loaded_role(handle, SMALL, DeepSpeedStrategy(3), FOUR, samples=8)
    assert divided.optimizer == 3850 * 4 * (moments + 1) / 4  # with the copy
    assert divided.stepping == (3850 * 4 / 4 if root else 0)


def test_optimizer_states_are_offloaded_only_if_the_run_is_not_on_the_cpu() -> None:
    handle = CausalLM("tiny", optimizer=Optimizer())
    strategy = DeepSpeedStrategy(offload_optimizer=True)
    for on_cpu, offloaded in ((False, True), (True, False)):
        role = loaded_role(handle, SMALL, strategy, Layout((0, 1), 2), samples=8, on_cpu=on_cpu)
        assert role.offloaded is offloaded


@pytest.mark.parametrize(("stage", "width", "here"), [(3, 2, 0), (3, 4, 0), (2, 2, 3850), (2, 4, 0), (1, 2, 23100)])
def test_offloading_also_takes_gradients_off_the_device_at_zero_3(stage: int, width: int, here: float) -> None:
    how = replace(ZERO3, stage=stage, width=width, offloaded=True)
    assert how.gradients_here == here
    assert how.loaded == how.weights + (how.gradients_here if stage == 3 else 0)


def test_engines_keep_what_they_say() -> None:
    def taken(engine: RolloutEngine, on_cpu: bool) -> Engine:
        return loaded_engine(engine, Layout((0, 1), 2), ZERO3, longest=20, samples=8, on_cpu=on_cpu)

    on_cpu = taken(VLLMEngine(kv_cache_gib=0.5), on_cpu=True)
    assert (on_cpu.memory.cache, on_cpu.memory.asleep) == (2**29, "weights and cache")
    on_gpu = taken(VLLMEngine(), on_cpu=False)
    assert on_gpu.memory == EngineMemory(None, 0.5, None, "nothing")
    assert (on_cpu.memory.max_num_seqs, taken(VLLMEngine(max_num_seqs=7), on_cpu=False).memory.max_num_seqs) == (256, 7)
    assert on_gpu.cache(capacity=80_000) == 40_000 - 7700
    plain = taken(TransformersEngine(max_batch=3), on_cpu=True)
    # Three at once of 20 tokens, two layers of keys and values of width 5, 2 bytes each
    assert (plain.memory.cache, plain.memory.asleep) == (3 * 20 * 2 * 2 * 5 * 2, "weights")
    # One of the layers carries a state of 7 numbers of 4 bytes, of a row of any length
    hybrid = replace(ZERO3, size=replace(SMALL, attending=1, state=7))
    held = loaded_engine(TransformersEngine(max_batch=3), Layout((0, 1), 2), hybrid, longest=20, samples=8, on_cpu=True)
    assert held.memory.cache == 3 * (20 * 2 * 1 * 5 * 2 + 7 * 4)


def test_engines_that_are_never_awake_together_are_not_added() -> None:
    small = engine(weights=10, cache=5, asleep="nothing")
    large = engine(weights=20, cache=10, asleep="weights")
    other = engine(weights=1, cache=1, asleep="weights and cache")
    memory = busy(actor=small, opponent=large, judge=other)
    assert memory.asleep == 22
    assert memory.awake == 15 + 20 + 2  # the actor's, and what the others keep: more than the opponent's 30 + 2
    assert replace(memory, together=(("actor", "opponent"),)).awake == 15 + 30 + 2
    assert busy().awake == 0


@pytest.mark.parametrize(("stage", "ranks", "raised"), [(0, 2, True), (2, 2, True), (3, 2, False), (0, 1, False)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_settings_that_are_at_their_end_are_not_advised(
    stage: int, ranks: int, raised: bool, checkpointing: bool
) -> None:
    layout = Layout(tuple(range(ranks)), ranks)
    role = replace(ACTOR, stage=stage, layout=layout, divided_over=ranks, checkpointing=checkpointing)
    memory = replace(busy(), roles={"actor": role}, capacity=9000)
    assert ("init_args.stage" in does_not_fit(memory)) is raised
    assert ("gradient_checkpointing" in does_not_fit(memory)) is not checkpointing


def test_of_several_engines_that_do_not_fit_the_line_says_that_they_may_share_one() -> None:
    memory = busy(actor=engine(10e9, 15e9, "weights and cache"), opponent=engine(8e9, 10e9, "weights"))
    line = does_not_fit(replace(memory, capacity=42e9))
    assert "out of memory by" in line
    assert line.endswith("let policies use one engine in turns (`engines.opponent: {share: actor}`)")


def test_the_table_adds_up_and_says_what_is_short() -> None:
    memory = busy(actor=engine(weights=7700, cache=30_000, asleep="nothing"))
    first, actor, reference, training, of_engine, short = memory_lines(memory, every=True)
    # Weights of two models, values and the engine; while training gradients of 6 bytes, activations, and logits with
    # the gradient of their layer, which are gone when gradients are reduced
    assert (memory.generating, memory.training) == (15_400 + 1000 + 37_700, 16_400 + 23_100 + 43_000 + 46_000)
    assert first == "memory of a rank: 54.1 kB generating, 128.5 kB training, of 40.0 kB"
    assert actor.split(maxsplit=1)[1] == (
        "weights 7.7 kB, gradients 23.1 kB, optimizer 0 B, activations 43.0 kB, in host memory 53.9 kB"
    )
    assert reference.split(maxsplit=1)[1] == "weights 7.7 kB"
    assert training.endswith("logits 46.0 kB, gathered 0 B, reduced 23.1 kB; values of the step 1.0 kB")
    assert of_engine.endswith("weights 7.7 kB, cache 30.0 kB")
    assert short.startswith(
        "  ! rank 0 is out of memory by 14.1 kB of 40.0 kB while generating; `rollout` holds 37.7 kB"
    )
