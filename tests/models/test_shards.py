"""The files of a model are those that transformers writes, whichever rank writes what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlflow.models.causal_lm import ScoringModel
from rlflow.models.optimizer import Optimizer
from rlflow.models.shards import divided, write_index
from rlflow.models.weight_files import INDEX, shard_name
from tests.checkpoint_files import load_model
from tests.ranks import RankPool
from tests.strategies.strategy_update import Stage, save_after_update

CPU = torch.device("cpu")
SGD = Optimizer(name="sgd", lr=0.1)
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen3Moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "Qwen2": {"tie_word_embeddings": True},
}


def write_by_transformers(name: str, folder: Path) -> Path:
    config = getattr(transformers, f"{name}Config")(**SMALL | KINDS[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_the_tensors_of_all_shards_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    expected = load_file(write_by_transformers(name, tmp_path) / "model.safetensors")
    model = ScoringModel.load(tmp_path, torch.float32, CPU)
    weights = model.saved()
    units = divided(model, {weight.name: weight.parameter.detach().to("meta") for weight in weights}, 3)
    found = {}
    for unit in units:
        parameters = {weight.name: weight.parameter.detach() for weight in weights if weight.name in unit.names}
        files = model.in_files(parameters)
        assert [*files] == [entry.key for entry in unit.entries]
        found |= files
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())

    filled = [sum(unit.nbytes for unit in units if unit.shard == shard) for shard in range(3)]
    assert max(filled) - min(filled) <= max(unit.nbytes for unit in units)
    write_index(tmp_path, units, 3)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert {*index["weight_map"].values()} == {shard_name(shard, 3) for shard in range(3)}


@pytest.mark.parametrize("stage", [3, "fsdp"])
def test_ranks_write_a_mixture_of_experts_that_transformers_loads(
    stage: Stage, tmp_path: Path, ranks3: RankPool
) -> None:
    folder = write_by_transformers("Qwen3Moe", tmp_path / "start")
    weights, *_ = ranks3.run(save_after_update, folder, stage, SGD, tmp_path / "saved")
    files = sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors"))
    assert files == [shard_name(shard, 3) for shard in range(3)]
    assert load_model(tmp_path / "saved").keys() == load_file(folder / "model.safetensors").keys()
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())
