"""Tokenizers and configurations in the folders of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import UserError, one_line
from rlflow.models.remote_code import stored_code

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

TOKENIZER = "tokenizer.json"


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        path: Folder of the model, or its name on the hub.
        trust_remote_code: Whether code in the model's folder may run.

    Raises:
        UserError: The tokenizer cannot be loaded, or only by such code.
    """
    from transformers import AutoTokenizer

    with loading("tokenizer", path, trust_remote_code):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    _require_vocabulary(path, tokenizer)
    return tokenizer


def load_config(path: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model.

    Args:
        path: Folder of the model, or its name on the hub.
        trust_remote_code: Whether code in the model's folder may run.

    Raises:
        UserError: The configuration cannot be loaded, or only by such code.
    """
    from transformers import AutoConfig

    with loading("configuration", path, trust_remote_code):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return config


@contextmanager
def loading(part: str, path: Path, trust_remote_code: bool) -> Iterator[None]:
    """A context for loading a part of a model, such as its tokenizer: any failure becomes an error about `model`.

    Args:
        part: Name of the part in errors.
        path: Folder or Hugging Face name of the model.
        trust_remote_code: Whether code in the model's folder may run.

    Raises:
        UserError: The part cannot be loaded, or only by such code.
    """
    try:
        with stored_code(path, part, trust_remote_code):
            yield
    except (UserError, AssertionError):
        raise
    except Exception as error:  # broken files raise all kinds: KeyError, AttributeError, tokenizers' bare Exception
        reason = (str(error) if isinstance(error, OSError | ValueError) else "").strip().split("\n")[0]
        reason = reason or f"{type(error).__name__}: {one_line(error)}"
        remedy = "check its files" if path.is_dir() else "check the name"
        raise UserError(f"`model` is {str(path)!r}, whose {part} cannot be loaded ({reason}); {remedy}") from error


def _require_vocabulary(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse the tokenizer that transformers makes for a folder without one: it drops every letter."""
    names = sorted(set(tokenizer.vocab_files_names.values()))
    missing = [name for name in names if not (path / name).is_file()]
    if path.is_dir() and missing and tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        raise UserError(
            f"`model` is {str(path)!r}, a folder without its tokenizer's files, so no text could be read: there is no"
            f" {' and no '.join(missing)}; copy {TOKENIZER if TOKENIZER in missing else missing[0]} from where the"
            " model is from"
        )


def require_same_vocabulary(
    paths: Mapping[str, Path], follows: str, tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> None:
    """Refuse roles whose vocabulary differs from `follows`'s, since all roles read the same token ids.

    Args:
        paths: Folder or Hugging Face name of each role's model.
        follows: The role whose tokenizer encodes the data.
        tokenizers: Tokenizers of that role, and of roles with another model.

    Raises:
        UserError: A tokenizer has another vocabulary.
    """
    vocabulary = tokenizers[follows].get_vocab()
    for role, tokenizer in tokenizers.items():
        other, path = tokenizer.get_vocab(), paths[role]
        differing = {token for token, _ in vocabulary.items() ^ other.items()}
        if differing:
            token = min(differing)
            raise UserError(
                f"`{role}` is {str(path)!r}, whose tokenizer is not that of `{follows}`, {str(paths[follows])!r}:"
                f" {token!r} is {other.get(token)} there and {vocabulary.get(token)} here, one of {len(differing)}"
                " tokens that differ; give a model with the same vocabulary"
            )


def stop_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, more: tuple[int, ...]) -> tuple[int, ...]:
    """All tokens that end a response, ascending.

    Raises:
        UserError: The model's generation config cannot be loaded.
    """
    from transformers import GenerationConfig
    from transformers.utils.hub import cached_file

    found, kinds = {*more, tokenizer.eos_token_id}, ("gated_repo", "missing_entries", "connection_errors")
    none_without = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    with loading("generation config", path, trust_remote_code=False):
        if cached_file(str(path), "generation_config.json", **none_without) is not None:
            of_model = GenerationConfig.from_pretrained(path).eos_token_id
            found |= set(of_model) if isinstance(of_model, list) else {of_model}
    return tuple(sorted(found - {None}))
