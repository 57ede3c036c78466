"""Writes `rlflow/models/tiny_merges.txt`, the merges of the embedded byte BPE, from the documents of the project.

    python -m benchmarks.tiny_merges

The file is part of the package, and tokens do not change with the documents: whoever runs this trains every model of
`tiny_bpe` anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from rlflow.models.tiny import MERGES

ROOT = Path(__file__).parents[1]
SIZE = 2044  # bytes and merges; four special tokens make 2,048


def merges(texts: Iterable[str], size: int) -> list[list[str]]:
    """The pairs that a byte BPE merges, in their order, until it has `size` entries; no pair crosses Qwen2's words."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    pairs: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return pairs


if __name__ == "__main__":
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pairs = merges((page.read_text(encoding="utf-8") for page in pages), SIZE)
    MERGES.write_text("".join(f"{first} {second}\n" for first, second in pairs), encoding="utf-8")
