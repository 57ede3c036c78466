from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow.errors import UserError
from rlflow.models.attention import packed_attention
from rlflow.models.causal_lm import ScoringModel
from rlflow.models.packing import Peers, pack
from rlflow.models.tiny import write_tiny_model
from rlflow.values.batch import Batch
from tests.checkpoint_files import write_model

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large enough for a wrong forward to show
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def write(folder: Path, name: str, kind: str = "CausalLM", **settings: object) -> Path:
    """A model of any architecture with random weights."""
    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    torch.manual_seed(0)
    getattr(transformers, f"{name}For{kind}")(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_have_their_hugging_face_names(tmp_path: Path, tie: bool) -> None:
    folder = write_tiny_model(tmp_path / "tiny", layers=1, tie=tie)
    names = {ScoringModel.hf_name(name) for name, _ in ScoringModel.load(folder, torch.float32, CPU).named_parameters()}
    assert names == {name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


@pytest.mark.parametrize("tie", [True, False])
def test_what_is_saved_is_what_transformers_loads(tmp_path: Path, tie: bool) -> None:
    model = ScoringModel.load(write_tiny_model(tmp_path / "tiny", layers=1, tie=tie), torch.float32, CPU)
    changed = {model.hf_name(name): parameter.detach() + 1 for name, parameter in model.named_parameters()}
    write_model(model, changed, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert {name for name, _ in loaded.named_parameters()} == set(changed)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, changed[name]), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie


def test_checkpointing_computes_layers_again_and_changes_no_gradient(tiny: Path, rows: Batch) -> None:
    gradients, calls = [], []
    for checkpointing in (False, True):
        model = ScoringModel.load(tiny, torch.float64, CPU, checkpointing).train()
        count: list[int] = []
        model.model.model.layers[1].self_attn.register_forward_hook(lambda *_, count=count: count.append(1))
        model(*pack(rows).arguments())[0].sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Phi3", {}),
        ("Granite", {"logits_scaling": 3.0}),
        ("Cohere2", {"logit_scale": 0.25, "head_dim": 8}),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    ],
)
def test_other_architectures_score_as_their_own_forward(tmp_path: Path, name: str, settings: Any) -> None:
    model = ScoringModel.load(write(tmp_path, name, **settings), torch.float32, CPU)
    model.check(model, CPU)  # raises where they differ


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("HyperCLOVAX", {"logits_scaling": 3.0}, "differ by"),  # multiplies where Granite divides
        ("Mamba", {}, "differ by"),  # a state that runs from one packed sequence into the next
        ("Bloom", {}, "differ by"),  # attention of its own, with a mask over the whole line
    ],
)
def test_a_model_that_would_be_scored_wrongly_is_refused(tmp_path: Path, name: str, settings: Any, reason: str) -> None:
    model = ScoringModel.load(write(tmp_path, name, **settings), torch.float32, CPU)
    with pytest.raises(UserError, match=f"{name}.*{reason}"):
        model.check(model, CPU)


def test_a_model_that_scores_divided_lines_otherwise_is_refused(tiny: Path) -> None:
    def across(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **others: Any
    ) -> tuple[Tensor, None]:
        return packed_attention(module, query, key, value, mask, scaling=others["scaling"])  # sees all sequences

    model = ScoringModel.load(tiny, torch.float32, CPU)
    model.divided = across
    with pytest.raises(UserError, match="forwards of whole sequences and of divided ones differ by"):
        model.check(model, CPU, Peers())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPTNeoX", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        ("OPT", {"dropout": 0.5, "layerdrop": 0.5, "word_embed_proj_dim": 32, "ffn_dim": 48}),  # without `nn.Dropout`
    ],
)
def test_dropout_is_off_even_in_training(name: str, settings: dict[str, float], tmp_path: Path, rows: Batch) -> None:
    folder = write(tmp_path, name, vocab_size=128, **settings)
    model = ScoringModel.load(folder, torch.float32, CPU).train()
    first, second = (model(*pack(rows).arguments())[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"model_type": "nonesuch"}', '{"model_type": "qwen2"}'])
def test_a_folder_that_holds_no_model_is_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="cannot be loaded") as refusal:
        ScoringModel.load(tmp_path, torch.float32, CPU)
    assert "\n" not in str(refusal.value)


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    weights = write_tiny_model(tmp_path / "tiny", layers=1) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be loaded"):
        ScoringModel.load(tmp_path / "tiny", torch.float32, CPU)


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", layers=1, intermediate_size=64)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"intermediate_size": 64', '"intermediate_size": 32'))
    with pytest.raises(UserError, match="cannot be loaded"):
        ScoringModel.load(folder, torch.float32, CPU)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", layers=1)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights, 'model\.norm\.weight'"):
        ScoringModel.load(folder, torch.float32, CPU)


def changed(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A tiny model with these tensors in its file."""
    write_tiny_model(folder, layers=1)
    weights = load_file(folder / "model.safetensors") | tensors
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_weight_that_is_not_a_number_is_refused_with_tensor_and_folder(value: float, tmp_path: Path) -> None:
    norm = torch.ones(128)
    norm[7] = value
    folder = changed(tmp_path / "tiny", {"model.norm.weight": norm})
    with pytest.raises(
        UserError, match=rf"'{folder}' cannot be loaded: 'model\.norm\.weight' has NaN or infinite values"
    ):
        ScoringModel.load(folder, torch.float32, CPU)


def test_tensors_that_the_model_does_not_know_are_reported_in_one_line(tmp_path: Path) -> None:
    extra = {name: torch.zeros(2) for name in ("model.layers.0.extra.weight", "zzz", "score.weight")}
    folder = changed(tmp_path / "tiny", extra)
    (line,) = ScoringModel.load(folder, torch.float32, CPU).remarks
    assert line.startswith(
        f"`model` '{folder}' has 2 tensors in its files that Qwen2ForCausalLM does not know, 'model.lay"
    )


def test_the_output_layer_of_another_kind_of_model_is_left_out_without_a_remark(tmp_path: Path) -> None:
    folder = changed(tmp_path / "tiny", {"score.weight": torch.zeros(1, 128)})
    assert ScoringModel.load(folder, torch.float32, CPU).remarks == []
