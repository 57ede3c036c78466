"""Models that are built without memory and filled part by part equal those that transformers reads whole."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ModelHandle
from rlflow.models.lora import LoRA
from rlflow.models.packed import PackedModel
from rlflow.models.scalar import ValueModel
from rlflow.models.shards import fill
from rlflow.models.tiny import write_tiny_model
from rlflow.models.weight_files import CHUNK_BYTES, WeightFiles
from rlflow.storage.safetensors_files import TensorRange
from tests.families.models import FAMILIES, SHORT, write_family
from tests.models.test_scoring import write
from tests.slow import slow_but

CPU = torch.device("cpu")
FUSED = {
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8},
}


def filled(handle: ModelHandle, folder: Path, dtype: torch.dtype, ranks: int) -> PackedModel:
    """The model, each of whose parameters was filled by so many ranks in turn, one part by each."""
    for rank in range(ranks):
        model = handle.load(folder, dtype, CPU, empty=True)
        assert all(parameter.is_meta for parameter in model.parameters())
        if rank == 0:
            order = [_nothing(each) for each in model.parameters()]
        made = dict(zip(model.parameters(), order, strict=True))
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, key, made[parameter])

        def part_of(parameter: nn.Parameter, rank: int = rank) -> TensorRange:
            size = -(-parameter.numel() // ranks)
            start = min(rank * size, parameter.numel())
            return TensorRange(start, parameter.detach().view(-1)[start : start + size])

        fill(model, part_of, lambda parameter: parameter.shape, CPU)
    return model


def _nothing(like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.full(like.shape, torch.nan, dtype=like.dtype), like.requires_grad)


def assert_alike(found: PackedModel, expected: PackedModel) -> None:
    for of_found, of_expected in ((found.state_dict(), expected.state_dict()), *_buffers(found, expected)):
        assert of_found.keys() == of_expected.keys()
        for name, tensor in of_expected.items():
            assert of_found[name].dtype == tensor.dtype, name
            assert torch.equal(of_found[name], tensor), name
    assert len(list(found.parameters())) == len(list(expected.parameters()))  # tied alike
    assert not found.model.training


def _buffers(found: PackedModel, expected: PackedModel) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(dict(found.named_buffers()), dict(expected.named_buffers()))]


# Falcon-H1 computes buffers of its layers, and GLM-4-MoE has one in its files.
@pytest.mark.parametrize("family", slow_but((*SHORT, "falcon_h1", "glm4_moe"), FAMILIES))
def test_a_model_of_every_family_filled_by_parts_is_the_one_loaded_whole(tmp_path: Path, family: str) -> None:
    folder, handle = write_family(family, tmp_path), CausalLM("m")
    assert_alike(filled(handle, folder, torch.bfloat16, 3), handle.load(folder, torch.bfloat16, CPU))


@pytest.mark.parametrize("name", FUSED)
def test_experts_that_files_store_one_by_one_are_filled_as_loaded_whole(tmp_path: Path, name: str) -> None:
    folder, handle = write(tmp_path, name, **FUSED[name]), CausalLM("m")
    expected = handle.load(folder, torch.float32, CPU)
    for ranks in (2, 7):  # a rank of 7 has parts of experts, and some have none
        assert_alike(filled(handle, folder, torch.float32, ranks), expected)


@pytest.mark.parametrize(
    "handle",
    [ValueModel("m"), CausalLM("m", lora=LoRA(rank=3)), ValueModel("m", lora=LoRA(rank=3))],
    ids=["critic", "adapters", "critic with adapters"],
)
def test_a_new_output_layer_and_new_adapters_are_those_of_a_model_loaded_whole(
    tmp_path: Path, handle: ModelHandle
) -> None:
    folder = write_tiny_model(tmp_path / "tiny", layers=1)
    found, expected = filled(handle, folder, torch.float32, 3), handle.load(folder, torch.float32, CPU)
    assert_alike(found, expected)
    trained = [weight.name for weight in expected.trained()]
    assert [weight.name for weight in found.trained()] == trained


@pytest.mark.parametrize("changed", [False, True])
def test_embeddings_are_tied_only_if_the_config_and_the_files_both_say_so(tmp_path: Path, changed: bool) -> None:
    folder, handle = write_tiny_model(tmp_path / "tiny", layers=1, tie=True), CausalLM("m")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][-1, -1] += changed
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    expected = handle.load(folder, torch.float32, CPU)
    assert (expected.output_layer.weight is expected.decoder.embed_tokens.weight) is not changed
    assert_alike(filled(handle, folder, torch.float32, 2), expected)


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (5, 2, 3)])
def test_any_range_of_a_tensor_is_read_and_no_more(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    files, flat = WeightFiles(tmp_path), whole.reshape(-1)
    read = _count(files, "weight")
    for start in range(flat.numel()):
        for end in range(start, flat.numel() + 1):
            read.clear()
            values = torch.full((end - start,), torch.nan, dtype=torch.float64)
            files.read("weight", TensorRange(start, values))
            assert torch.equal(values, flat[start:end].double())
            assert sum(read) == end - start


def test_no_more_than_a_chunk_is_read_at_a_time(tmp_path: Path) -> None:
    rows = 3 * CHUNK_BYTES // 8 // 1024
    save_file({"weight": torch.zeros(rows, 1024, dtype=torch.int8)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    read = _count(files, "weight")
    files.read("weight", TensorRange(5, torch.empty(rows * 1024 - 9, dtype=torch.int8)))
    assert max(read) <= CHUNK_BYTES // 8
    assert sum(read) == rows * 1024 - 9


def test_any_block_of_a_tensor_is_read_and_no_more(tmp_path: Path) -> None:
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    read = _count(files, "weight")
    for top, bottom in combinations(range(6), 2):
        for left, right in combinations(range(7), 2):
            read.clear()
            values = torch.full((bottom - top, right - left), torch.nan)
            files.read("weight", TensorRange(top * 6 + left, values, 6))
            assert torch.equal(values, whole[top:bottom, left:right])
            assert sum(read) == values.numel()


def _count(files: WeightFiles, name: str) -> list[int]:
    """The elements of each tensor that is read of `name` from now on."""
    opened = files._in[name]
    reading, read = opened.read, []

    def counted(name: str, start: int, length: int) -> Tensor:
        read.append(length)
        return reading(name, start, length)

    opened.read = counted  # type: ignore[method-assign]
    return read


def _in_shards(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(folder / "one", layers=1, tie=False))
    model.save_pretrained(folder / "several", max_shard_size="100KB")
    return folder / "several"


def test_a_model_in_several_files_is_filled_as_loaded_whole(tmp_path: Path) -> None:
    folder, handle = _in_shards(tmp_path), CausalLM("m")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_alike(filled(handle, folder, torch.float32, 2), handle.load(folder, torch.float32, CPU))


def _without_a_file(folder: Path) -> str:
    file = min(folder.glob("model-*.safetensors"))
    file.unlink()
    return f"lacks '{file.name}', which its model.safetensors.index.json names; copy the model once more"


def _with_a_file_cut_short(folder: Path) -> str:
    file = min(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    return f"{file.name} is missing, cut short or broken .*; copy the model once more"


def _with_a_broken_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{")
    return r"model\.safetensors\.index\.json is missing, cut short or broken .*; copy the model once more"


def _without_safetensors(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return "has no weights in safetensors, and only from these .* save it by `save_pretrained`"


def _without_a_tensor(folder: Path) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index["model.norm.weight"]
    save_file({name: each for name, each in load_file(file).items() if name != "model.norm.weight"}, file)
    return r"lacks 1 weights, 'model\.norm\.weight' the first of them"


def _with_another_shape(folder: Path) -> str:
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 384', '"intermediate_size": 380'))
    return r"cannot be loaded: 'model\.layers\.0\.mlp\..*' has the shape .*384.* in its files, where .*380.* is needed"


@pytest.mark.parametrize(
    "spoil",
    [
        _without_a_file,
        _with_a_file_cut_short,
        _with_a_broken_index,
        _without_safetensors,
        _without_a_tensor,
        _with_another_shape,
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path: Path, spoil: Any) -> None:
    folder = _in_shards(tmp_path)
    refusal = spoil(folder)
    with pytest.raises(UserError, match=refusal) as refused:
        CausalLM("m").load(folder, torch.float32, CPU, empty=True)
    assert "\n" not in str(refused.value)


def test_nan_in_what_a_rank_reads_is_refused_with_tensor_and_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "one", layers=1)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"'{folder}' cannot be loaded: 'model\.norm\.weight' has NaN or infinite"):
        filled(CausalLM("m"), folder, torch.float32, 2)


def test_a_buffer_may_hold_the_infinity_of_a_mask_and_a_parameter_may_not(tmp_path: Path) -> None:
    save_file({"mask": torch.tensor([0.0, -torch.inf])}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path)
    assert files.whole("mask", of_buffer=True).tolist() == [0.0, -torch.inf]
    with pytest.raises(UserError, match="'mask' has NaN or infinite values"):
        files.whole("mask")
