"""A model that is divided from the first byte holds, bit for bit, what it holds where it is loaded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import LoRA
from rlflow.models.scalar import RewardModel, ValueModel
from rlflow.models.tiny import write_tiny_model
from rlflow.values.layout import Layout
from tests.models.test_scoring import write
from tests.ranks import RankPool
from tests.strategies.divided_models import growth_while_loading, load, refused
from tests.strategies.strategy_update import Stage

DIVIDED = pytest.mark.parametrize("stage", [3, "fsdp"])

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def written(folder: Path, tie: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A model none of whose weights has as many elements as 2 ranks divide, or 3."""
    sizes = {"hidden_size": 36, "intermediate_size": 29, "layers": 1, "heads": 2, "kv_heads": 1}
    return write_tiny_model(folder, tie=tie, dtype=dtype, **sizes)  # type: ignore[arg-type]


def alike(
    stage: Stage, ranks: RankPool, handle: ModelHandle, folder: Path, precision: str, layout: Layout | None = None
) -> None:
    whole = ranks.run(load, handle, folder, 0, precision, layout)
    divided = ranks.run(load, handle, folder, stage, precision, layout)
    assert any(found is not None for found in whole)
    for rank, (expected, found) in enumerate(zip(whole, divided, strict=True)):
        assert (expected is None) == (found is None), rank
        if expected is None:
            continue
        for of_whole, of_divided in zip(expected[:2], found[:2], strict=True):
            assert of_whole.keys() == of_divided.keys()
            for name, tensor in of_whole.items():
                assert of_divided[name].dtype == tensor.dtype, name
                assert torch.equal(of_divided[name], tensor), name
        assert expected[2] == found[2]


@pytest.mark.parametrize(
    ("tie", "stored", "precision", "trainable"),
    [(True, "fp32", "fp32", True), (False, "bf16", "fp32", True), (True, "fp32", "bf16", False)],
)
@DIVIDED
def test_a_language_model_loaded_divided_has_the_weights_of_one_loaded_whole(
    stage: Stage, tmp_path: Path, ranks2: RankPool, tie: bool, stored: str, precision: str, trainable: bool
) -> None:
    folder = written(tmp_path / "model", tie, DTYPES[stored])
    alike(stage, ranks2, CausalLM(str(folder), trainable=trainable), folder, precision)


@DIVIDED
def test_a_critic_loaded_on_two_of_three_ranks_has_the_weights_of_one_loaded_whole(
    stage: Stage, tmp_path: Path, ranks3: RankPool
) -> None:
    folder = written(tmp_path / "model")
    alike(stage, ranks3, ValueModel(str(folder)), folder, "fp32", Layout((1, 2), 2))


@DIVIDED
def test_a_frozen_reward_model_loaded_divided_has_the_weights_of_one_loaded_whole(
    stage: Stage, tmp_path: Path, ranks2: RankPool
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(written(tmp_path / "model"), num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    folder = tmp_path / "classifier"
    model.save_pretrained(folder)
    alike(stage, ranks2, RewardModel(str(folder), trainable=False), folder, "fp32")


@DIVIDED
def test_adapters_and_the_digest_of_their_base_are_those_of_a_model_loaded_whole(
    stage: Stage, tmp_path: Path, ranks2: RankPool
) -> None:
    folder = written(tmp_path / "model")
    alike(stage, ranks2, CausalLM(str(folder), lora=LoRA(rank=3)), folder, "bf16")


@pytest.mark.parametrize("stage", [0, 3, "fsdp"])
def test_a_model_that_would_be_scored_wrongly_is_refused(tmp_path: Path, ranks2: RankPool, stage: Stage) -> None:
    folder = write(tmp_path, "HyperCLOVAX", logits_scaling=3.0)  # multiplies where Granite divides
    for refusal in ranks2.run(refused, CausalLM(str(folder), trainable=False), folder, stage):
        assert "its own forward and the packed one differ by" in refusal


def test_a_rank_that_loads_its_part_never_holds_the_whole_model(tmp_path: Path, ranks2: RankPool) -> None:
    small = write_tiny_model(tmp_path / "small", layers=1)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "layers": 14, "dtype": torch.bfloat16}
    large = write_tiny_model(tmp_path / "large", **sizes)  # type: ignore[arg-type]
    for growth, of_model in ranks2.run(growth_while_loading, small, large, 3):
        assert 0.45 * of_model < growth < 0.95 * of_model  # half, two copies of a layer, and some MB of modules


@pytest.mark.slow
def test_no_rank_ever_holds_more_than_its_part_and_a_layer(tmp_path: Path) -> None:
    small = write_tiny_model(tmp_path / "small")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "layers": 24, "dtype": torch.bfloat16}
    large = write_tiny_model(tmp_path / "large", **sizes)  # type: ignore[arg-type]
    with RankPool(2) as ranks:
        divided, whole = (ranks.run(growth_while_loading, small, large, stage) for stage in (3, 0))
    for growth, of_model in divided:
        assert of_model > 290e6  # in float32; the file has half
        assert growth < 0.7 * of_model  # two copies of a layer while it is gathered, and some MB of modules
    assert all(growth > 0.95 * of_model for growth, of_model in whole)
