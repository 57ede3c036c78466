"""A config that may be shown to others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# Whole words of a key: `hf_token` is one, `max_tokens`, `token_budget` and `tokenizer` are none.
_SECRET_KEY = re.compile(
    r"(^|[_\-.])(api[_-]?key|(access|private|secret)[_-]?key|token|secret|password|credentials?)$", re.I
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_secrets(config: Any) -> Any:
    """A copy of `config` (mappings, lists and plain values) in which secrets are `***`.

    Secrets are the values of keys such as `api_key`, `hf_token` or `password`, unless None, and the login in a URL.
    """
    if isinstance(config, Mapping):
        return {
            key: HIDDEN if value is not None and _SECRET_KEY.search(str(key)) else without_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [without_secrets(entry) for entry in config]
    if isinstance(config, str):
        return _URL_LOGIN.sub(f"{HIDDEN}@", config)
    return config
