"""Whether a value is a secret by the key that it stands under."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# Words of a key, in the singular; one of these is enough: `wandb_password`, `clientSecrets`.
_ANYWHERE = {"apikey", "credential", "passphrase", "passwd", "password", "pwd", "secret"}
_ANYWHERE |= {"accesskey", "accesstoken", "authtoken", "authorization", "privatekey", "secretkey"}
_AT_THE_END = {"auth", "bearer", "cookie", "dsn", "pat", "webhook"}
# `hf_token` is a secret, `eos_token` is a text.
_TOKENS_OF_TEXT = {"additional", "bos", "cls", "end", "eos", "eot", "first", "image", "last", "mask", "max", "min"}
_TOKENS_OF_TEXT |= {"completion", "input", "new", "next", "num", "on", "output", "pad", "per", "prompt", "response"}
_TOKENS_OF_TEXT |= {"scores", "sep", "special", "start", "stop", "unk"}
_TOKENS_OF_TEXT |= {"audio", "bad", "boi", "call", "eoi", "fim", "ignore", "loss", "mean", "query", "think", "thinking"}
_TOKENS_OF_TEXT |= {"tool", "video"}
_MARKS = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]")  # `<think>`, `<|im_end|>`, `[MASK]`: a token of text by its looks
_PLACES = {"dir", "file", "folder", "name", "path"}  # `password_file`: where it is, and not what
NO_VALUES = {"", "false", "none", "null", "off", "true", "unset"}
# `api_key` and `openai_key` are secrets, `sort_key` is none: what a key of a service, or to something locked, is for.
_LOCKS = {"access", "account", "admin", "api", "auth", "client", "db", "deploy", "encryption", "license", "master"}
_LOCKS |= {"private", "root", "secret", "service", "signing", "ssh", "storage", "user"}
_SERVICES = {"anthropic", "aws", "azure", "claude", "cohere", "comet", "databricks", "deepseek", "fireworks", "gcp"}
_SERVICES |= {"gemini", "github", "gitlab", "google", "groq", "hf", "huggingface", "langsmith", "mistral", "neptune"}
_SERVICES |= {"nvidia", "openai", "openrouter", "perplexity", "pinecone", "qdrant", "replicate", "sendgrid", "serper"}
_SERVICES |= {"slack", "stripe", "swanlab", "tavily", "together", "twilio", "voyage", "wandb", "xai"}
_ORDER = {"cache", "dict", "foreign", "group", "partition", "primary", "row", "sort"}  # `SORT_KEY`
_IN_ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*_KEYS?")
_DRAWN = re.compile(
    r"(?:[0-9a-f]{32,}|[0-9A-F]{32,}|(?=[A-Za-z+-]*\d)(?=[A-Z\d+-]*[a-z])(?=[a-z\d+-]*[A-Z])[A-Za-z\d+-]{20,})={0,2}"
)
_NUMBERS = re.compile(r"[\d\s.,:+_eE\[\](){}%-]*")
_LONGEST = 200  # letters of a key that are looked at, its last


def is_secret(key: Any, value: Any) -> bool:
    """Whether a value is a secret by its key; what says that there is none is no secret.

    Under keys such as `token` and `pass`, which count as often, numbers and special tokens are none. Under any key that
    ends in `key`, what looks drawn at random is one.
    """
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in NO_VALUES):
        return False
    named = named_secret(str(key))
    if named == "perhaps":
        return not _is_numbers(value) and not (isinstance(value, str) and _MARKS.fullmatch(value))
    return named == "secret" or (named == "drawn" and _DRAWN.fullmatch(str(value)) is not None)


def named_secret(key: str) -> str:
    """What a key says of its values: they are `secret`, `perhaps` unless they only count or mark, `drawn` only if they
    look drawn at random, or nothing."""
    return _named(key[-_LONGEST:])


@lru_cache(maxsize=4096)
def _named(key: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()) if word]
    if not words:
        return ""
    *before, last = words
    one = last if last.endswith("ss") else last.removesuffix("s")
    if last in _PLACES:
        return ""
    if one in _AT_THE_END or any(not _ANYWHERE.isdisjoint({word, word.removesuffix("s")}) for word in words):
        return "secret"
    if one == "token" and _TOKENS_OF_TEXT.isdisjoint(before):
        return "perhaps"
    if one == "pass":
        return "perhaps"
    if one == "key" and not (_LOCKS | _SERVICES).isdisjoint(before):
        return "secret"
    if _IN_ENVIRONMENT.fullmatch(key.lstrip("-")) and _ORDER.isdisjoint(before):
        return "secret"
    return "drawn" if last.endswith("key") else ""


def _is_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_numbers, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return value is None or isinstance(value, int | float) or _NUMBERS.fullmatch(str(value)) is not None
