"""Ranks that divide each layer train as one process does, and refuse what they cannot divide."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.logprobs import Softmax
from rlflow.models.lora import LoRA
from rlflow.models.optimizer import Optimizer
from rlflow.models.tensor_parallel import check_tensor_parallel
from rlflow.models.tiny import write_tiny_model
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.models.test_scoring import write
from tests.ranks import RankPool
from tests.slow import slow_but
from tests.strategies.reference import distance, plain_update
from tests.strategies.state import put_together
from tests.strategies.strategy_update import Stage, check_updates
from tests.strategies.tensor_parallel import (
    check_averages,
    divided_critic,
    divided_update,
    head,
    loading,
    norm_of_unlike_gradients,
    readouts,
    train_and_save,
)

SGD = Optimizer(name="sgd", lr=0.1, gradient_clipping=0.5)
# Neither 2 nor 4 ranks divide the tokens; one of the prompts has the token that pads.
SIZES = {"vocab_size": 121, "num_key_value_heads": 4, "pad_token_id": 40, "num_labels": 1}
FAMILIES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "tied qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 4, "tie_word_embeddings": True}),
}


def written(folder: Path, family: str, kind: str = "CausalLM") -> Path:
    name, settings = FAMILIES[family]
    return write(folder / family, name, kind, **SIZES | settings)


@cache
def reference(folder: Path, values: bool = False) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    with wide_casts():
        return plain_update(folder, lambda p: torch.optim.SGD(p, lr=0.1), 0.5, 2, "eager", values)


@pytest.mark.parametrize(
    ("family", "ranks", "size", "precision", "checkpointing"),
    slow_but(
        [("qwen3", 4, 2, "fp64", True)],
        [
            (family, ranks, size, precision, ranks == 2)
            for family in FAMILIES
            for ranks, size in ((2, 2), (4, 2), (4, 4))
            for precision in ("fp32", "fp64")
        ]
        + [("qwen3", 4, 2, "fp64", True)],
    ),
)
def test_ranks_that_divide_each_layer_train_as_plain_torch_in_float64(
    family: str,
    ranks: int,
    size: int,
    precision: str,
    checkpointing: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder, pool = written(tmp_path, family), request.getfixturevalue(f"ranks{ranks}")
    for outcome in pool.run(divided_update, folder, size, SGD, precision, 1, checkpointing):
        check_updates(outcome, reference(folder), 1e-5 if precision == "fp32" else 1e-10)


@pytest.mark.parametrize(("ranks", "size"), slow_but([(2, 2)], [(2, 2), (4, 2), (4, 4)]))
def test_a_critic_of_divided_layers_trains_as_plain_torch_in_float64(
    ranks: int, size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, pool = written(tmp_path, "qwen3", "SequenceClassification"), request.getfixturevalue(f"ranks{ranks}")
    for outcome in pool.run(divided_critic, folder, size, SGD):
        check_updates(outcome, reference(folder, values=True), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size", "other"), [(2, 2, 2), (4, 2, 4), (4, 4, 1)])
def test_an_average_of_divided_layers_is_plain_torch_s_and_resumes_otherwise(
    ranks: int, size: int, other: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, pool = written(tmp_path, "qwen3"), request.getfixturevalue(f"ranks{ranks}")
    check_averages(folder, pool, (size, 1), (other, 1), tmp_path, SGD)


@pytest.mark.slow
def test_a_layer_and_a_sequence_are_divided_together(tmp_path: Path, ranks4: RankPool) -> None:
    folder = written(tmp_path, "qwen3")
    for outcome in ranks4.run(divided_update, folder, 2, SGD, "fp64", 2):
        check_updates(outcome, reference(folder), 1e-10)


@pytest.mark.slow
def test_in_bf16_gradients_are_near_those_of_float64_and_peers_have_the_same_weights(
    tmp_path: Path, ranks4: RankPool
) -> None:
    folder = written(tmp_path, "qwen3")
    gradients, _, _ = reference(folder)
    outcomes = ranks4.run(divided_update, folder, 2, SGD, "bf16")
    for outcome in outcomes:
        assert distance(outcome.gradients[0], gradients[0]) < 0.1
        assert all(torch.equal(outcome.weights[key], of) for key, of in outcomes[0].weights.items())


@pytest.mark.slow
def test_ranks_of_a_layer_take_one_norm(tmp_path: Path, ranks4: RankPool) -> None:
    assert len(set(ranks4.run(norm_of_unlike_gradients, written(tmp_path, "qwen3")))) == 1


OF_TOKENS = torch.tensor([0.5, 1.3, 1.0, 0.7, 2.0, 1.1, 0.9, 3.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("softmax", [Softmax(0.7), Softmax(OF_TOKENS, scale=0.5, cap=2.0, wide=True)])
@pytest.mark.parametrize("count", slow_but([7], [5, 7, 12]))
def test_a_divided_head_has_the_logprobs_entropies_and_gradients_of_a_whole_one(
    count: int, softmax: Softmax, ranks2: RankPool
) -> None:
    for divided, whole in ranks2.run(head, count, softmax, 8):
        for found, expected in zip(divided, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for divided, whole in ranks2.run(head, count, softmax, 8, 1):  # rows that are said to be others are seen
        assert (divided[0] - whole[0]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tied qwen2", "qwen3"])
def test_every_score_of_a_divided_model_is_that_of_a_whole_one(
    family: str, tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    folder = written(tmp_path, family)
    (whole,) = ranks1.run(readouts, folder, 1)
    for divided in ranks2.run(readouts, folder, 2):
        for found, expected in zip(divided, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_run_with_divided_layers_resumes_to_the_bit_and_is_exported_whole(tmp_path: Path, ranks2: RankPool) -> None:
    folder = written(tmp_path, "qwen3")
    (_, expected), _ = ranks2.run(train_and_save, folder, 2, tmp_path / "at once", 2)
    ranks2.run(train_and_save, folder, 2, tmp_path / "in two", 1)
    (_, found), _ = ranks2.run(train_and_save, folder, 2, tmp_path / "in two", 1, True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "in two" / "model").state_dict()
    assert saved.keys() == found.keys() == expected.keys()
    for key, of in expected.items():
        assert torch.equal(found[key], of), key
        assert torch.equal(saved[key], of), key


# Ranks, of these to a layer, and the strategy: before and after.
DIVISIONS: list[tuple[tuple[int, int, Stage], tuple[int, int, Stage]]] = [
    ((2, 2, "fsdp"), (2, 1, "fsdp")),
    ((4, 2, "fsdp"), (4, 1, "fsdp")),
    ((4, 1, "fsdp"), (4, 2, "fsdp")),
    ((4, 2, "fsdp"), (4, 4, "fsdp")),
    ((4, 4, "fsdp"), (2, 2, "fsdp")),
    ((4, 2, "fsdp"), (1, 1, "fsdp")),
    ((4, 2, "fsdp"), (2, 1, 1)),
    ((4, 2, "fsdp"), (4, 1, 3)),
    ((4, 1, 1), (4, 2, "fsdp")),
    ((2, 1, 3), (4, 4, "fsdp")),
]


@pytest.mark.parametrize(("before", "after"), slow_but(DIVISIONS[:1], DIVISIONS))
def test_a_checkpoint_resumes_at_another_division_of_layers(
    before: tuple[int, int, Stage], after: tuple[int, int, Stage], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = written(tmp_path, "qwen3")
    ran = []
    for (ranks, size, stage), resume in ((before, False), (after, True)):
        pool = request.getfixturevalue(f"ranks{ranks}")
        ran.append(pool.run(train_and_save, model, size, tmp_path, 0 if resume else 2, resume, stage))
    expected, found = (put_together([parts for parts, _ in each]) for each in ran)
    assert {kind for kinds in expected.values() for kind in kinds} == {"weight", "exp_avg", "exp_avg_sq"}
    for key, kinds in expected.items():
        for kind, of in kinds.items():
            assert torch.equal(found[key][kind], of), (key, kind)
    assert all(torch.equal(ran[1][0][1][key], of) for key, of in ran[0][0][1].items())


@pytest.mark.slow
def test_loading_reads_from_files_what_a_rank_holds_and_no_more(tmp_path: Path, ranks4: RankPool) -> None:
    small = write_tiny_model(tmp_path / "small", kv_heads=4)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "kv_heads": 4, "layers": 4, "tie": False}
    large = write_tiny_model(tmp_path / "large", **sizes)  # type: ignore[arg-type]
    of_file = (large / "model.safetensors").stat().st_size
    for size in (2, 4):
        for read, held in ranks4.run(loading, small, large, size):
            assert held < 0.26 * of_file  # norms are held by all peers
            assert held < read < held + 0.01 * of_file  # config.json, and the header twice


@pytest.mark.parametrize(
    ("settings", "size", "handle", "found"),
    [
        ({}, 3, CausalLM("m"), "does not divide the 4 attention heads"),
        ({"num_key_value_heads": 2}, 4, CausalLM("m"), "does not divide the 2 heads of keys"),
        ({"intermediate_size": 50}, 4, CausalLM("m"), "does not divide the 50 columns"),
        ({"vocab_size": 15}, 4, CausalLM("m"), "has 15 tokens, so a rank may get none; give at most 3"),
        ({}, 2, CausalLM("m", lora=LoRA(dropout=0.1)), "`lora.dropout` of `actor` is 0.1"),
        ({"model_type": "gpt_oss"}, 2, CausalLM("m"), "of the type 'gpt_oss'; layers can be divided in llama, mistral"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_line(
    settings: dict[str, object], size: int, handle: ModelHandle, found: str
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    config = AutoConfig.for_model(**{"model_type": "qwen3", **sizes, **settings})
    with pytest.raises(UserError, match=f"`placement.actor.tensor_parallel_size` is {size}, ") as refused:
        check_tensor_parallel(config, size, "actor", handle)
    assert found in str(refused.value)
    check_tensor_parallel(config, 1, "actor", handle)


def test_strategies_that_cannot_divide_layers_say_which_can() -> None:
    roles, layouts = {"actor": CausalLM("tiny")}, {"actor": Layout((0, 1), 1, tensor_parallel_size=2)}
    with pytest.raises(UserError, match=r"DeepSpeedStrategy computes with whole layers; use `strategy: fsdp`"):
        DeepSpeedStrategy(1).check_roles(roles, layouts)
    with pytest.raises(UserError, match=r"`hsdp_shard_size` is 2, and `placement.actor.tensor_parallel_size` is 2"):
        FSDPStrategy(hsdp_shard_size=2).check_roles(roles, layouts)
    FSDPStrategy().check_roles(roles, layouts)
