"""Tokenizers and configurations in the folders of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder, or of that hub name.

    Raises:
        UserError: There is none to be had.
    """
    from transformers import AutoTokenizer

    with _found("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return tokenizer


def load_config(path: Path) -> PretrainedConfig:
    """The configuration in a model's folder, or of that hub name.

    Raises:
        UserError: There is none to be had.
    """
    from transformers import AutoConfig

    with _found("configuration", path):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return config


@contextmanager
def _found(part: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"`model` is {str(path)!r}, whose {part} is code that lies beside it (`auto_map`), and rlflow runs no"
                " code of a model; take one that transformers knows by itself"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"`model` is {str(path)!r}, whose {part} cannot be loaded ({reason}); check the name"
        ) from error


def require_same_vocabulary(paths: Mapping[str, Path], follows: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every role reads the token ids that the followed one writes."""
    vocabulary = tokenizer.get_vocab()
    for role, path in paths.items():
        if path == paths[follows]:
            continue
        other = load_tokenizer(path).get_vocab()
        differing = {token for token, _ in vocabulary.items() ^ other.items()}
        if differing:
            token = min(differing)
            raise UserError(
                f"`{role}` is {str(path)!r}, whose tokenizer is not that of `{follows}`, {str(paths[follows])!r}:"
                f" {token!r} is {other.get(token)} there and {vocabulary.get(token)} here, one of {len(differing)}"
                " tokens that differ; give a model with the same vocabulary"
            )


def stop_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, more: tuple[int, ...]) -> tuple[int, ...]:
    """All tokens that end a response, ascending."""
    from transformers import GenerationConfig

    found = {*more, tokenizer.eos_token_id}
    if not path.is_dir() or (path / "generation_config.json").is_file():
        of_model = GenerationConfig.from_pretrained(path).eos_token_id
        found |= set(of_model) if isinstance(of_model, list) else {of_model}
    return tuple(sorted(found - {None}))
