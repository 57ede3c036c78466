"""What is shown to others, without secrets: known by the key that they stand under, or by their shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
LONGEST = 2**19  # of a text that is shown; more than a config may have
# Words of a key, of which one is enough: `wandb_password`, `clientSecret`.
_ANYWHERE = {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "pwd", "secret", "secrets"}
_ANYWHERE |= {"accesskey", "accesstoken", "authtoken", "authorization", "privatekey", "secretkey"}
_AT_THE_END = {"auth", "bearer", "cookie", "cookies", "dsn", "pat", "webhook"}
# `hf_token` is a secret, `eos_token` is a text; `api_key` is one, `sort_key` is none.
_TOKENS_OF_TEXT = {"additional", "bos", "cls", "end", "eos", "eot", "first", "image", "last", "mask", "next", "pad"}
_TOKENS_OF_TEXT |= {"sep", "special", "start", "stop", "unk"}
_KEYS = {"access", "account", "api", "auth", "client", "deploy", "encryption", "private", "secret", "service"}
_KEYS |= {"signing", "ssh", "storage", "wandb"}
_SHAPES = re.compile(
    r"""
    \b(?:hf|api_org)_[A-Za-z0-9]{16,}                       # Hugging Face
    | \bsk-[A-Za-z0-9_-]{16,}                               # OpenAI, Anthropic
    | \b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}         # Stripe
    | \b(?:gsk|r8|npm|dop_v1|wandb_v1)_[A-Za-z0-9_]{20,}
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,}   # GitHub
    | \bglpat-[\w-]{16,} | \bnvapi-[\w-]{16,} | \bpypi-[\w-]{40,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                         # AWS
    | \bAIza[\w-]{35} | \bya29\.[\w-]{16,}                  # Google
    | \bxox[abeprs]-[A-Za-z0-9-]{10,} | (?<=hooks\.slack\.com/services/)\S+
    # A JSON web token; a long one is tried from its beginning alone, as words below.
    | (?:\beyJ[\w-]{8,500}+|(?<![\w-])eyJ[\w-]{8,}+)\.[\w-]{8,}\.[\w-]*
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<=://)[^/@\s'"`]+(?=@)                              # the login of a URL
    """,
    re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"\b(Bearer|Basic) +(?=[\w.~+/-]*[\d=])[\w.~+/=-]{8,}", re.I)
_QUERY = re.compile(r"([?&](?:[\w-]*(?:token|key|secret|password|signature)|sig)=)[^&\s'\"`]+", re.I)
# A word is tried from its beginning alone: else a long one takes the square of its length.
_ENTRY = re.compile(
    r"""(?<![A-Za-z0-9_.-])(?P<before>[0-9_.-]*+)(?P<key>[A-Za-z][A-Za-z0-9_.-]*+)(?P<between>['"`]?\s*[:=]\s*)"""
    r"""(?P<value>'[^']*'|"[^"]*"|[^\s'"`,;(){}\[\]]+)"""
)
_HEX = re.compile(r"[0-9a-f]{32,}", re.I)


def without_secrets(config: Any) -> Any:
    """A copy of `config` (mappings, lists and plain values) in which secrets are `***`.

    Secrets are the values of keys such as `api_key`, `hf_token` or `password`, unless None, and what looks like one
    wherever it stands, see `text_without_secrets`.
    """
    if isinstance(config, Mapping):
        return {
            key: _hidden(value) if _is_secret(key, value) else without_secrets(value) for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [without_secrets(entry) for entry in config]
    if isinstance(config, str):
        return text_without_secrets(config)
    return config


def text_without_secrets(text: str) -> str:
    """`text` with `***` for what `without_shapes` hides, and for the value in `password: value`.

    Of one that is longer than `LONGEST` characters, the rest is left out.
    """
    shown = _ENTRY.sub(_without_value, without_shapes(text[: 2 * LONGEST]))  # half a secret is not known as one
    return shown if len(text) <= LONGEST else f"{shown[:LONGEST]}... ({len(text):,} characters)"


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with `***` for secrets: the values of `--api_key VALUE` and `--api_key=VALUE`, and
    what `text_without_secrets` hides."""
    shown, key = list[str](), ""
    for argument in arguments:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if (value or not option) and is_secret_key(option or key):
            shown.append(f"{option}{equals}{HIDDEN}")
        else:
            shown.append(text_without_secrets(argument))
        key = option if not equals else ""
    return shown


def without_shapes(text: str) -> str:
    """`text` with `***` for API tokens by their shapes, private keys, and logins and signatures in URLs."""
    text = _SHAPES.sub(HIDDEN, text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _QUERY.sub(rf"\1{HIDDEN}", text)


def is_secret_key(key: str) -> bool:
    """Whether values of this key are secrets, by its words."""
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()) if word]
    if not words:
        return False
    *before, last = words
    return (
        not _ANYWHERE.isdisjoint(words)
        or last in _AT_THE_END
        or (last == "token" and _TOKENS_OF_TEXT.isdisjoint(before))
        or (last == "key" and not _KEYS.isdisjoint(before))
    )


def _is_secret(key: Any, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    return is_secret_key(str(key)) or (str(key).lower().endswith("key") and _HEX.fullmatch(str(value)) is not None)


def _hidden(value: Any) -> Any:
    """The shape of a section stays: its keys say what was set."""
    if isinstance(value, Mapping):
        return {key: None if entry is None else _hidden(entry) for key, entry in value.items()}
    return HIDDEN


def _without_value(entry: re.Match[str]) -> str:
    if not is_secret_key(entry["key"]):
        return entry[0]
    return f"{entry['before']}{entry['key']}{entry['between']}{_quoted(entry['value'])}"


def _quoted(value: str) -> str:
    return f"{value[0]}{HIDDEN}{value[0]}" if value[0] in "'\"" else HIDDEN
