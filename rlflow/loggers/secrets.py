"""A config as it is shown to others: without the values that stand under keys of secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

HIDDEN = "***"
# Words of a key, in the singular; one of these is enough: `wandb_password`, `clientSecrets`.
_ANYWHERE = re.compile(
    r"(api|access|private|secret)key|(access|auth)token|authorization|credential|pass(phrase|wd|word)|pwd|secret"
)
_AT_THE_END = re.compile("auth|bearer|cookie|dsn|pat|webhook")
# `hf_token` is a secret, `eos_token` is a text, and `password_file` says where it is, not what.
_TOKENS_OF_TEXT = re.compile(
    "additional|audio|bad|bo[is]|call|cls|completion|end|eo[its]|fim|first|ignore|image|input|last|loss|mask|max|mean"
    "|min|new|next|num|on|output|pad|per|prompt|query|response|scores|sep|special|start|stop|think(ing)?|tool|unk|video"
)
_PLACES = {"dir", "file", "folder", "name", "path"}
_NO_VALUES = {"", "false", "none", "null", "off", "true", "unset"}
# `api_key` is a secret and `sort_key` is none: what a key opens; of any other key a value that looks drawn at random.
_LOCKS = re.compile(
    "access|account|admin|api|auth|client|db|deploy|encryption|license|master|private|root|secret|service|signing|ssh"
    "|storage|user"
)
_DRAWN = re.compile(r"[0-9a-fA-F]{32,}={0,2}|(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+-]{20,}={0,2}")
_MARKS = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]")  # `<think>`, `<|im_end|>`, `[MASK]`: a token of text by its looks
_LONGEST = 10_000  # letters of an option that is read as YAML
_NUMBERS = re.compile(r"[\d\s.,:+_eE\[\](){}%-]*")


def without_secrets(config: Any) -> Any:
    """A copy of `config` (mappings, lists and plain values) in which the values of secret keys are `***`.

    Such keys are `api_key`, `hf_token`, `password` and others, see `is_secret`. In a list of texts so is what follows
    an option such as `--api_key`. Texts are not searched.
    """
    if isinstance(config, Mapping):
        return {
            key: _hidden(value) if is_secret(key, value) else without_secrets(value) for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        if config and all(isinstance(entry, str) for entry in config):
            return arguments_without_secrets(config)
        return [without_secrets(entry) for entry in config]
    return config


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with `***` for the values of `--api_key VALUE` and `--api_key=VALUE`, and for values
    that are mappings or lists with a secret in them, as YAML."""
    shown, key = list[str](), ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            name, value = "", argument
        is_option = argument.startswith("--") and not equals
        if not is_option and (is_secret(name or key, value) or _holds_secret(value)):
            value = HIDDEN
        shown.append(f"{name}{equals}{value}")
        key = argument if is_option else ""
    return shown


def is_secret(key: Any, value: Any) -> bool:
    """Whether a value is a secret by its key; what says that there is none is no secret.

    Under keys such as `token` and `pass`, which count as often, numbers and special tokens are none. Under any key that
    ends in `key`, what looks drawn at random is one.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _NO_VALUES):
        return False
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)[-200:]).lower())
    if not words or words[-1] in _PLACES:
        return False
    *before, last = words
    last = last if last.endswith("ss") else last.removesuffix("s")
    if _AT_THE_END.fullmatch(last) or any(map(_ANYWHERE.fullmatch, (word.removesuffix("s") for word in words))):
        return True
    if last == "pass" or (last == "token" and not any(map(_TOKENS_OF_TEXT.fullmatch, before))):
        return not _is_numbers(value) and not (isinstance(value, str) and _MARKS.fullmatch(value))
    if last == "key" and any(map(_LOCKS.fullmatch, before)):
        return True
    return last.endswith("key") and isinstance(value, str) and _DRAWN.fullmatch(value) is not None


def _is_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_numbers, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return value is None or isinstance(value, int | float) or _NUMBERS.fullmatch(str(value)) is not None


def _hidden(value: Any) -> Any:
    """The shape of a section stays: its keys say what was set."""
    if isinstance(value, Mapping):
        return {key: None if entry is None else _hidden(entry) for key, entry in value.items()}
    return HIDDEN


def _holds_secret(text: str) -> bool:
    """Whether a text is a mapping or a list as YAML, as options give them, with a secret in it."""
    if len(text) > _LONGEST or not (text.startswith(("{", "[")) or ": " in text):
        return False
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
    return isinstance(found, dict | list) and without_secrets(found) != found
