"""What is shown to others, without secrets: known by the key that they stand under, or by their shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.errors import MORE, READ, SHOWN, shortened
from rlflow.loggers.secret_keys import is_secret, named_secret

HIDDEN = "***"
WHOLE = 4 * READ  # letters of the beginning and of the end of a text in which secrets are looked for
# Every pattern takes time in proportion to the text: where it does not match, it is not tried again within a word.
_SHAPES = re.compile(
    r"""
    \b(?:hf|api_org)_[A-Za-z0-9]{16,}                       # Hugging Face
    | \bsk-(?=[A-Za-z_-]{0,60}\d)[A-Za-z0-9_-]{16,}         # OpenAI, Anthropic; not `sk-learn-and-its-friends`
    | \b(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}         # Stripe
    | \b(?:gsk|r8|npm|dop_v1|wandb_v1)_[A-Za-z0-9_]{20,}
    | \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{16,}   # GitHub
    | \bglpat-[\w-]{16,} | \bnvapi-[\w-]{16,} | \bpypi-[\w-]{40,}
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                         # AWS
    | \bAIza[\w-]{35} | \bya29\.[\w-]{16,}                  # Google
    | \bxox[abeprs]-[A-Za-z0-9-]{10,} | (?<=hooks\.slack\.com/services/)\S+
    | \beyJ[\w-]{8,}+(?:\.[\w-]{8,}+\.[\w-]*+)?             # a JSON web token
    | \bSG\.[\w-]{10,}+\.[\w-]{10,}                         # SendGrid
    | \bdapi[0-9a-f]{32}(?:-\d)?\b                          # Databricks
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<=://)[^/@\s'"`]++(?=@)                             # the login of a URL
    """,
    re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(r"\b(Bearer|Basic) +(?=[\w.~+/-]*[\d=])[\w.~+/=-]{8,}", re.I)
_QUERY = re.compile(r"([?&](?:[\w-]*(?:token|key|secret|password|signature)|sig)=)[^&\s'\"`]+", re.I)
_KEY = re.compile(
    r"""
    (?<![\w.-])(?:
    (?P<key>[\w.-]++) \\*+['"`]?\]?\s*+[:=]++>?\s*+         # key: "key": \"key\": ["key"]= key =>
    | (?P<option>--[\w.-]++) (?: ['"]\s*+,\s*+ | \s++(?!-))  # '--key', --key
    )
    | \(\s*+['"](?P<first>[\w.-]++)['"]\s*+,\s*+(?=['"])     # ("key", "value")
    """,
    re.VERBOSE,
)
# A text whose end is missing goes on to the end of all: a message may be cut.
_VALUE = re.compile(
    r"""
    (?:(?:[!&][^\s'",]*+[ ]++)++)? (?!os\.(?:environ|getenv)\b)  # a tag or an anchor of YAML; the name of a variable
    (?P<itself>
    [bru]?(?:
      (?P<triple>'{3}|"{3}) .*? (?: (?P=triple) | \Z)
    | (?P<escaped>\\++['"]) .*? (?: (?P=escaped) | \Z)
    | ' (?: [^'\\]++ | \\. )*+ (?: ' | \\?\Z)
    | " (?: [^"\\]++ | \\. )*+ (?: " | \\?\Z)
    | ` [^`]*+ (?: ` | \Z)
    )
    | [\[({]
    | \*{3}(?=&)                                            # hidden in a URL
    | -[ ]++[^\n]++ (?: \n\s*+ -[ ]++[^\n]++ )*+           # a list of YAML, a line each
    | [|>][-+\d]*+[ ]*+\n (?P<indent>[ \t]++)[^\n]*+ (?: \n(?P=indent)[^\n]*+ )*+  # a block of YAML
    | [\w.]++\(\s*+ (?: '(?:[^'\\]++|\\.)*+(?:'|\\?\Z) | "(?:[^"\\]++|\\.)*+(?:"|\\?\Z) ) \s*+\)?+  # SecretStr('value')
    | (?: (?:Api-?Key|Basic|Bearer|Digest|Negotiate|Token) [ ]++ )? [^\s'"`,;(){}\[\]]++
    )
    """,
    re.VERBOSE | re.DOTALL | re.I,
)
_ONE_WORD = re.compile(r"""['"`]?[A-Za-z\d+-]++={0,2}['"`]?(?![^\s'"`,;(){}\[\]])""")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_BRACKETS = re.compile(r"""[\[({]|[\])}]|'(?:[^'\\]++|\\.)*+(?:'|\\?\Z)|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)""", re.DOTALL)
_QUOTE = re.compile(r"""[bru]?\\*(['"`])""", re.I)


def without_secrets(config: Any) -> Any:
    """A copy of `config` (mappings, lists and plain values) in which secrets are `***`.

    Secrets are the values of keys such as `api_key`, `hf_token` or `password`, unless None, and what looks like one
    wherever it stands, see `text_without_secrets`; in a list also what follows an option such as `--api_key`.
    """
    if isinstance(config, Mapping):
        return {
            key: _hidden(value) if is_secret(key, value) else without_secrets(value) for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        if config and all(isinstance(entry, str) for entry in config):
            return arguments_without_secrets(config)
        return [without_secrets(entry) for entry in config]
    if isinstance(config, str):
        return text_without_secrets(config)
    return config


def text_without_secrets(text: str) -> str:
    """`text` with `***` for what `without_shapes` hides, and for the value in `password: value`, which may be a list
    or a mapping."""
    text = without_shapes(text)
    parts, until, at = list[str](), 0, 0
    while found := _KEY.search(text, at):
        at, key = found.end(), found["key"] or found["option"] or found["first"]
        named = named_secret(key)
        if found["first"] and named != "secret" and not key.isupper():  # `Importance("token", "truncate")`
            continue
        value = (_ONE_WORD if named == "drawn" else _VALUE).match(text, at) if named else None
        if value is None:
            continue
        start = value.start("itself") if value.re is _VALUE else at
        end = _closed(text, start) if text[start] in _CLOSING else value.end()
        shown = text[at:end]
        bare = shown.strip("'\"`\\")
        if is_secret(key, bare) and not (key == "tokens" and shown.isalpha()):  # `too many tokens: give fewer`
            parts += text[until:at], _in_its_signs(shown)
            until = end
        at = end  # a value that is no secret has no key in it
    return "".join([*parts, text[until:]])


def shown(text: str) -> str:
    """`text` as it stands in a log or on a terminal: without secrets, and of a line or a whole that is too long without
    its middle. Secrets are looked for in more than is shown, so that none is cut before it is known."""
    if len(text) > 2 * WHOLE:
        first, last = text_without_secrets(shortened(text[: WHOLE + 1], WHOLE)), text_without_secrets(text[-WHOLE:])
        text = first[: WHOLE // 2] + MORE.format(len(text) - WHOLE) + " ... " + last[-WHOLE // 2 :]
    else:
        text = text_without_secrets(text)
    return "\n".join(map(_shown_line, text.split("\n")))


def arguments_without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with `***` for secrets: the values of `--api_key VALUE` and `--api_key=VALUE`, and
    what `text_without_secrets` hides."""
    shown, key = list[str](), ""
    for argument in arguments:
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if (value or not option) and is_secret(option or key, value):
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


def _shown_line(line: str) -> str:
    if len(line) <= SHOWN:
        return line
    last = SHOWN // 4
    return line[: SHOWN - last] + MORE.format(len(line) - SHOWN) + " ... " + line[-last:]


def _hidden(value: Any) -> Any:
    """The shape of a section stays: its keys say what was set."""
    if isinstance(value, Mapping):
        return {key: None if entry is None else _hidden(entry) for key, entry in value.items()}
    return HIDDEN


def _closed(text: str, at: int) -> int:
    """Where the bracket that opens at `at` is closed, or the end."""
    depth = 0
    for found in _BRACKETS.finditer(text, at):
        if found[0] in "[({":
            depth += 1
        elif found[0] in "])}":
            depth -= 1
        if depth == 0:
            return found.end()
    return len(text)


def _in_its_signs(value: str) -> str:
    """`***` in the quotes or brackets of a value."""
    quote = _QUOTE.match(value)
    if quote is not None:
        return f"{quote[0][-1]}{HIDDEN}{quote[1]}" if "\\" not in quote[0] else f"{quote[0]}{HIDDEN}{quote[0]}"
    closing = _CLOSING.get(value[0])
    return f"{value[0]}{HIDDEN}{closing}" if closing else HIDDEN
