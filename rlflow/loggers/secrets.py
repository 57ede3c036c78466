"""A config without the values of secret keys, to be shown to others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
# Matches a key's words in lower case and the singular, joined by `_`: `wandb_password`, `client_secret`,
# `aws_access_key`.
_SECRET = re.compile(
    r"(^|_)(pass(phrase|wd|word)|pwd|secret|credential|authorization|(api|access|private|secret)_?key|(access|auth)_?token)(_|$)"
    r"|(^|_)(auth|bearer|cookie|dsn|pat|webhook)$"
    r"|(^|_)(access|account|admin|api|auth|client|db|deploy|encryption|license|master|private|root|secret|service|signing|ssh"
    r"|storage|user)_(\w+_)?key$"
)
_OFTEN_NONE = re.compile(r"(^|_)(pass|token)$")
# `hf_token` is a secret and `eos_token` is a text; `password_file` says where it is, not what.
_TOKEN_OF_TEXT = re.compile(
    r"(^|_)(additional|audio|bad|bo|boi|call|cls|completion|end|eo|eoi|eot|fim|first|ignore|image|input|last|loss|mask|max"
    r"|mean|min|new|next|num|on|output|pad|per|prompt|query|response|score|sep|special|start|stop|think|thinking|tool|unk"
    r"|video)_(\w+_)?token$"
)
_PLACE = re.compile(r"_(dir|file|folder|name|path)$")
_NUMBER = re.compile(r"[\d.,:+_eE-]+")


def without_secrets(config: Any) -> Any:
    """A copy of `config` (mappings, lists and plain values) in which the values of secret keys are `***`.

    Such keys are `api_key`, `hf_token`, `password` and others, see `is_secret`. In a list of texts so is what follows
    an option such as `--api_key`. Texts are not searched.

    Example:
        `{"url": "https://a.org", "api_key": "x", "run": ["serve", "--password", "y"]}` is shown as
        `{"url": "https://a.org", "api_key": "***", "run": ["serve", "--password", "***"]}`.
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
    """The arguments of a command with `***` for the values of `--api_key VALUE` and `--api_key=VALUE`."""
    shown, key = list[str](), ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_option = argument.startswith("--") and not equals
        if equals and is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(HIDDEN if not is_option and is_secret(key, argument) else argument)
        key = argument if is_option else ""
    return shown


def is_secret(key: Any, value: Any) -> bool:
    """Whether a value is a secret by its key; a value that is not set is none.

    Under `token` and `pass`, which count as often, numbers are none: `hf_token: hf_abc` is a secret, `token: 3` is not.
    """
    if value is None or value == "" or isinstance(value, bool):
        return False
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)[-200:]).lower())
    name = "_".join(word if word.endswith("ss") else word.removesuffix("s") for word in words)
    if _PLACE.search(name):
        return False
    if _SECRET.search(name):
        return True
    return _OFTEN_NONE.search(name) is not None and not _TOKEN_OF_TEXT.search(name) and not _is_number(value)


def _is_number(value: Any) -> bool:
    """Whether a value, or all that a list or mapping holds, is a number."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_number, value.values() if isinstance(value, Mapping) else value))
    return value is None or _NUMBER.fullmatch(str(value)) is not None


def _hidden(value: Any) -> Any:
    """A section of secrets with its keys, which say what was set, and `***` for each value."""
    if isinstance(value, Mapping):
        return {key: None if entry is None else _hidden(entry) for key, entry in value.items()}
    return HIDDEN
