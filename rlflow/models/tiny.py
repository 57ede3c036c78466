"""The embedded model: a small random Qwen2 with a character-level tokenizer, made from a seed without a network."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from rlflow.errors import UserError
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


def resolve_model(model: str, scratch: Path, said_by: str = "`model`") -> Path:
    """The place of the weights of `model`: a folder, or the Hugging Face name itself.

    Args:
        model: `tiny`, a folder in Hugging Face form, or a Hugging Face name `organisation/name`.
        scratch: Folder in which `tiny` is written. All ranks may call this at the same time.
        said_by: Name in errors of the setting that named the model.

    Raises:
        UserError: `model` is none of these.
    """
    if model == "tiny":
        return write_tiny_model(scratch / "tiny")
    folder = Path(model)
    if os.path.exists(folder):  # False for names that no folder can have, for which `Path.exists` raises
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise UserError(
                f"{said_by} is {model!r}, which holds an adapter and no model; write the model of both by"
                f" `rlflow export --model {model} --to FOLDER`, and give that folder"
            )
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{said_by} is {model!r}, which has no config.json; give a model's folder in Hugging Face form"
            )
        return folder
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        offline_unless_reached()
        return folder
    raise UserError(
        f"{said_by} is {model!r:.200}, which is neither a folder nor a Hugging Face name; "
        "give an existing folder, organisation/name, or `tiny`"
    )


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
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
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))

    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer(max_position)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype=dtype,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    # Not `model.save_pretrained`, which writes only on the first rank of a process group.
    weights = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(draft)
    model.generation_config.save_pretrained(draft)
    tokenizer.save_pretrained(draft)

    try:
        os.rename(draft, folder)
    except OSError:
        # Another rank was first; its folder holds the same bytes.
        if not (folder / "config.json").is_file():
            raise
        shutil.rmtree(draft)
    return folder


def tiny_tokenizer(max_length: int = 2048) -> Any:
    """A tokenizer of 128 entries, one for each ASCII character; its id is its code.

    Codes of control characters serve as special tokens: 0 ends a text, 1 pads. Characters beyond ASCII are dropped. The
    class is the one that `AutoTokenizer` uses for every Qwen2 model, whatever the folder says.

    Args:
        max_length: Longest sequence, in tokens.
    """
    from transformers import Qwen2Tokenizer

    special = {code: f"<|reserved_{code}|>" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}
    special |= {0: EOS, 1: PAD, 2: TURN_START, 3: TURN_END}
    # Byte-level vocabularies write each invisible character as the one 256 code points after it.
    written = {code: chr(code if code > 32 else 256 + code) for code in range(127)}
    return Qwen2Tokenizer(
        vocab={name: code for code, name in (written | special).items()},
        merges=[],
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=list(special.values()),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
    )
