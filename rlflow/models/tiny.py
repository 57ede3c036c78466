"""The embedded models: a random Qwen2, Qwen3-MoE, and Idefics3, which reads pictures.

They are made from a seed without a network. A token is a character; of `tiny_bpe` it is one of a byte BPE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from rlflow.errors import UserError
from rlflow.models.checkpoint_weights import is_checkpoint, model_folder, model_of_checkpoint
from rlflow.process.hub import offline_unless_reached

EOS, PAD = "<|endoftext|>", "<|pad|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (  # short, as each character is a token
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{% set f = tool.function %}"
    " {{ f.name }}({{ f.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}",
)
# Tokens of Idefics3's processor, by the codes of control characters that they take.
VISION_TOKENS = {4: "<image>", 5: "<fake_token_around_image>", 6: "<global-img>", 7: "<end_of_utterance>"}
EMBEDDED = ("tiny", "tiny_bpe", "tiny_moe", "tiny_vision")
MERGES = Path(__file__).with_name("tiny_merges.txt")  # of the byte BPE, see benchmarks/tiny_merges.py


def resolve_model(model: str, scratch: Path, setting: str = "`model`", role: str = "actor") -> Path:
    """The place of the weights of `model`: a folder, or the Hugging Face name itself.

    Args:
        model: `tiny`, `tiny_bpe`, `tiny_moe`, `tiny_vision`, a folder in Hugging Face form, the folder of a run or of
            one of its checkpoints, or a Hugging Face name `organisation/name`.
        scratch: Folder in which embedded models, and those of checkpoints, are written. All ranks may call this at the
            same time.
        setting: Name in errors of the setting that named the model.
        role: Role of a checkpoint whose weights are taken; if it has no such role, those of `actor` or of its only one.

    Raises:
        UserError: `model` is none of these.
    """
    if model == "tiny":
        return write_tiny_model(scratch / "tiny")
    if model == "tiny_bpe":
        return write_tiny_model(scratch / "tiny_bpe", tokenizer="bpe", max_position=8192)
    if model == "tiny_moe":
        return write_tiny_moe_model(scratch / "tiny_moe")
    if model == "tiny_vision":
        return write_tiny_vision_model(scratch / "tiny_vision")
    folder = Path(model)
    if os.path.exists(folder / "model") and not os.path.exists(folder / "config.json"):  # the folder of a run
        folder = folder / "model"
    elif is_checkpoint(folder):
        folder = model_of_checkpoint(folder, role, scratch)
    if os.path.exists(folder):  # False for names that no folder can have, for which `Path.exists` raises
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise UserError(
                f"{setting} is {model!r}, which holds an adapter and no model; write the model of both by"
                f" `rlflow export --model {model} --to FOLDER`, and give that folder"
            )
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{setting} is {model!r}, which has no config.json; give a model's folder in Hugging Face form"
            )
        return folder
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        offline_unless_reached()
        return folder
    raise UserError(
        f"{setting} is {model!r:.200}, which is neither a folder nor a Hugging Face name; "
        f"give an existing folder, organisation/name, or {' or '.join(f'`{name}`' for name in EMBEDDED)}"
    )


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: Literal["characters", "bpe"] = "characters",
    hidden_size: int = 128,
    intermediate_size: int = 384,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    tie: bool = True,
    dtype: torch.dtype = torch.float32,
    max_position: int = 2048,
) -> Path:
    """Write a Qwen2 model with random weights, and its tokenizer, in Hugging Face form; return the folder.

    A folder that exists already is not changed. The folder appears only when it is complete, so several ranks may write
    it at the same time.

    Args:
        folder: Folder to write.
        seed: Seed of the random weights; the caller's random state is left alone.
        tokenizer: Whether a token is an ASCII character, of 128, or one of a byte BPE with 2,048 entries that was
            trained on the documents of this project: a third as many tokens, of any text.
        hidden_size: A multiple of `heads`.
        intermediate_size: Width inside the feed-forward layers.
        layers: Number of layers.
        heads: Number of query heads; a multiple of `kv_heads`.
        kv_heads: Number of key and value heads.
        tie: Whether the output layer is the embedding.
        dtype: Dtype of the weights on disk.
        max_position: Longest sequence, in tokens.
    """
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen2Config, Qwen2ForCausalLM

    writes = tiny_bpe_tokenizer(max_position) if tokenizer == "bpe" else tiny_tokenizer(max_position)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        vocab_size=len(writes),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
        **_ends(writes),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    return write_model(folder, model, writes, dtype)


def write_tiny_moe_model(folder: Path, *, seed: int = 0, max_position: int = 2048) -> Path:
    """Write a Qwen3-MoE of two layers, with random weights and its tokenizer; return the folder.

    A token goes to two of a layer's eight experts. See `write_tiny_model`.

    Args:
        folder: Folder to write.
        seed: Seed of the random weights.
        max_position: Longest sequence, in tokens.
    """
    if (folder / "config.json").is_file():
        return folder
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = tiny_tokenizer(max_position)
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype=torch.float32,
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position,
        tie_word_embeddings=True,
        **_ends(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(config)  # type: ignore[no-untyped-call]
    return write_model(folder, model, tokenizer)


def write_tiny_vision_model(folder: Path, *, seed: int = 0, max_position: int = 2048) -> Path:
    """Write an Idefics3 model with random weights, its tokenizer and its processor; return the folder.

    A picture is scaled to 56 x 56 pixels. The tower makes 16 patches and 4 features of it. See `write_tiny_model`.

    Args:
        folder: Folder to write.
        seed: Seed of the random weights.
        max_position: Longest sequence, in tokens.
    """
    if (folder / "config.json").is_file():
        return folder
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = tiny_tokenizer(max_position, VISION_TOKENS, VISION_CHAT_TEMPLATE)
    ends = _ends(tokenizer)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder = {"vocab_size": len(tokenizer), "intermediate_size": 192, "num_key_value_heads": 2}
    decoder |= {"max_position_embeddings": max_position, "tie_word_embeddings": False}
    config = Idefics3Config(
        architectures=["Idefics3ForConditionalGeneration"],
        dtype=torch.float32,
        text_config={"model_type": "llama", **sizes, **decoder, **ends},
        vision_config={**sizes, "intermediate_size": 96, "image_size": 56, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids(VISION_TOKENS[4]),
        scale_factor=2,
        tie_word_embeddings=False,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Idefics3ForConditionalGeneration(config)  # type: ignore[no-untyped-call]
        for name, weight in model.named_parameters():  # transformers' are so small that nothing is learned for long
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.2 if "embed_tokens" in name else weight[0].numel() ** -0.5)
    side = {"longest_edge": 56}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor: Any = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=VISION_CHAT_TEMPLATE)
    return write_model(folder, model, processor)


def _ends(tokenizer: Any) -> dict[str, Any]:
    """A configuration's ids of the tokens that begin, end and fill a row."""
    return {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def write_model(folder: Path, model: Any, processor: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Write a transformers model with its tokenizer, or its processor with a tokenizer; return the folder.

    Args:
        folder: Folder to write. It appears only when it is complete; a folder that exists already is not changed.
        model: The model.
        processor: The tokenizer or processor.
        dtype: Dtype of the weights on disk.
    """
    from safetensors.torch import save_file

    with model_folder(folder) as draft:
        # Not `model.save_pretrained`, which writes only on the first rank of a process group.
        weights = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(draft)
        model.generation_config.save_pretrained(draft)
        processor.save_pretrained(draft)
    return folder


def tiny_tokenizer(
    max_length: int = 2048, more: Mapping[int, str] = MappingProxyType({}), chat_template: str = CHAT_TEMPLATE
) -> Any:
    """A tokenizer of 128 entries, one for each ASCII character; its id is its code.

    Codes of control characters serve as special tokens: 0 ends a text, 1 pads. Characters beyond ASCII are dropped. The
    class is the one that `AutoTokenizer` uses for every Qwen2 model, whatever the folder says.

    Args:
        max_length: Longest sequence, in tokens.
        more: Further special tokens, by the codes of control characters.
        chat_template: Template of conversations.
    """
    special = {code: f"<|reserved_{code}|>" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}
    special |= {0: EOS, 1: PAD, 2: TURN_START, 3: TURN_END, **more}
    # Byte-level vocabularies write each invisible character as the one 256 code points after it.
    written = {code: chr(code if code > 32 else 256 + code) for code in range(127)}
    return _qwen2_tokenizer(written | special, [], special.values(), max_length, chat_template)


def tiny_bpe_tokenizer(max_length: int = 8192) -> Any:
    """A tokenizer of 2,048 entries: the special tokens of `tiny_tokenizer` that end, pad and divide, bytes, and merges.

    Args:
        max_length: Longest sequence, in tokens.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    special = (EOS, PAD, TURN_START, TURN_END)
    merges = [tuple(line.split(" ")) for line in MERGES.read_text(encoding="utf-8").splitlines()]
    written = dict(enumerate([*special, *sorted(ByteLevel.alphabet()), *map("".join, merges)]))
    return _qwen2_tokenizer(written, merges, special, max_length, CHAT_TEMPLATE)


def _qwen2_tokenizer(
    written: Mapping[int, str], merges: list[Any], special: Collection[str], max_length: int, chat_template: str
) -> Any:
    from transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(
        vocab={name: code for code, name in written.items()},
        merges=merges,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=list(special),
        chat_template=chat_template,
        model_max_length=max_length,
    )
