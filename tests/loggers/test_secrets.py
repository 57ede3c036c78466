"""What of a config is hidden."""

from __future__ import annotations

import pytest

from rlflow.loggers.secrets import without_secrets


@pytest.mark.parametrize(
    "key", ["api_key", "WANDB_API_KEY", "hf_token", "token", "password", "client-secret", "access_key"]
)
def test_the_value_of_a_secret_key_is_hidden_at_any_depth(key: str) -> None:
    assert without_secrets({"logger": [{"init_args": {key: "abc"}}]}) == {"logger": [{"init_args": {key: "***"}}]}


@pytest.mark.parametrize("key", ["max_tokens", "token_budget", "tokenizer", "stop_token_ids", "keyword", "secretary"])
def test_a_key_that_only_resembles_one_is_shown(key: str) -> None:
    assert without_secrets({key: 4096}) == {key: 4096}


def test_a_secret_that_is_not_set_is_shown_as_not_set() -> None:
    assert without_secrets({"api_key": None}) == {"api_key": None}


def test_the_login_of_a_url_is_hidden() -> None:
    assert without_secrets("https://me:pass@example.org/data") == "https://***@example.org/data"


def test_the_config_itself_is_left_as_it_was() -> None:
    config = {"api_key": "abc"}
    without_secrets(config)
    assert config == {"api_key": "abc"}
