from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from rlflow.errors import UserError
from rlflow.models.sizes import KNOWN
from rlflow.models.tiny import EOS, MERGES, PAD, TURN_END, TURN_START, resolve_model, write_tiny_model
from tests.ranks import RankPool

ASCII = "".join(map(chr, range(32, 127))) + "\n\t\r"


def test_the_tokenizer_gives_back_every_ascii_text(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for text in (ASCII, "  two  spaces \n\n  and lines \n", "12+34=46"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_token_is_the_ascii_code_of_its_character(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer(ASCII).input_ids == [ord(character) for character in ASCII]


def test_the_vocabulary_has_128_entries_in_tokenizer_and_model(tiny: Path) -> None:
    assert len(AutoTokenizer.from_pretrained(tiny)) == 128
    assert AutoModelForCausalLM.from_pretrained(tiny).config.vocab_size == 128


def test_end_and_padding_are_two_tokens_that_model_and_tokenizer_agree_on(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (0, 1)


def test_special_tokens_are_left_out_of_decoded_text(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode([52, 50, 31, 0, 1], skip_special_tokens=True) == "42"


def test_the_chat_template_marks_turns(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids[0] == 2


def test_weights_are_a_function_of_the_seed(tmp_path: Path) -> None:
    folders = [write_tiny_model(tmp_path / name, seed=seed, layers=1) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, same, other = (load_file(folder / "model.safetensors")["model.embed_tokens.weight"] for folder in folders)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    write_tiny_model(tmp_path / "tiny", layers=1)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("tie", [True, False])
def test_the_output_layer_is_the_embedding_where_tied(tmp_path: Path, tie: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "tiny", layers=1, tie=tie))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


def test_sizes_and_dtype_reach_the_folder(tmp_path: Path) -> None:
    folder = write_tiny_model(
        tmp_path / "tiny", hidden_size=64, intermediate_size=96, layers=3, heads=8, kv_heads=4, dtype=torch.bfloat16
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["num_hidden_layers"] == 3
    assert load_file(folder / "model.safetensors")["model.layers.2.mlp.up_proj.weight"].shape == (96, 64)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", layers=1)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert write_tiny_model(folder, seed=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.fixture(scope="module")
def byte_bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny_bpe", tmp_path_factory.mktemp("models"))


def test_the_byte_bpe_gives_back_every_text(byte_bpe: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_bpe)
    for text in (ASCII, "Grüße aus 東京 🎉", "\x00\x1b\x7f control", "  two  spaces \n\n  and lines \n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_byte_bpe_tokens_are_the_merges_in_order_within_the_words_of_qwen2(byte_bpe: Path) -> None:
    ranks = {tuple(line.split()): rank for rank, line in enumerate(MERGES.read_text().splitlines())}
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's alphabet writes as themselves
    names = {byte: chr(byte) for byte in shown}
    names |= {byte: chr(256 + place) for place, byte in enumerate(sorted({*range(256)} - {*shown}))}
    expected = []
    text = 'You can call the tool \'add\' with 12+345 tokens, naïvely:\n{"name": "add"}  <tool_call>'
    for word in regex.findall(PRETOKENIZE_REGEX, text):
        parts = [names[byte] for byte in word.encode()]
        while (best := min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)), default=())) in ranks:
            place = [*pairwise(parts)].index(best)
            parts[place : place + 2] = ["".join(best)]
        expected += parts
    tokenizer = AutoTokenizer.from_pretrained(byte_bpe)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == expected


def test_the_model_of_the_byte_bpe_has_its_vocabulary_and_tiny_s_template(byte_bpe: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(byte_bpe), AutoModelForCausalLM.from_pretrained(byte_bpe)
    assert (model.config.vocab_size, len(tokenizer), model.config.max_position_embeddings) == (2048, 2048, 8192)
    assert sum(parameter.numel() for parameter in model.parameters()) == KNOWN["tiny_bpe"].parameters
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], return_dict=False)
    assert [turn[0], turn[-2]] == tokenizer.convert_tokens_to_ids([TURN_START, TURN_END]) == [2, 3]


def _resolve_at_once(scratch: str) -> str:
    dist.barrier()
    return str(resolve_model("tiny", Path(scratch)))


def test_ranks_that_write_tiny_concurrently_end_with_one_folder(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(_resolve_at_once, str(tmp_path)) == [str(tmp_path / "tiny")] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")


def _write_alone(scratch: str) -> dict[str, bytes]:
    folder = write_tiny_model(Path(scratch) / str(dist.get_rank()), layers=1)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_rank_writes_the_same_bytes(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(_write_alone, str(tmp_path))
    assert "model.safetensors" in first
    assert first == second


def test_a_folder_and_a_hub_name_stand_for_themselves(tiny: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny), tmp_path) == tiny
    assert str(resolve_model("Qwen/Qwen2.5-0.5B", tmp_path)) == "Qwen/Qwen2.5-0.5B"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("model", ["tyni", "/no/such", "./missing/model", "a/b/c", ""])
def test_a_name_that_is_not_a_model_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`model` is .*give"):
        resolve_model(model, tmp_path)
