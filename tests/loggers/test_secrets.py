"""The values of a config that are hidden."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow.loggers.secrets import arguments_without_secrets, without_secrets


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "WANDB_API_KEY",
        "hf_token",
        "token",
        "authToken",
        "password",
        "password_of_the_store",
        "passwd",
        "client-secret",
        "aws_secret_access_key",
        "access_key",
        "ssh_key",
        "secretkey",
        "aws_secretkey",
        "private_rsa_key",
        "api_v2_key",
        "access_id_key",
        "api_openai_key",
        "apikey",
        "credentials",
        "Authorization",
        "basic_auth",
        "cookie",
        "slack_webhook",
        "passwords",
        "db_pass",
        "api_keys",
        "hf_tokens",
        "tokens",
    ],
)
def test_the_value_of_a_secret_key_is_hidden_at_any_depth(key: str) -> None:
    assert without_secrets({"logger": [{"init_args": {key: "abc"}}]}) == {"logger": [{"init_args": {key: "***"}}]}


@pytest.mark.parametrize(
    "key",
    [
        "max_tokens",
        "token_budget",
        "tokenizer",
        "stop_token_ids",
        "keyword",
        "secretary",
        "eos_token",
        "sort_key",
        "SORT_KEY",
        "answer_key",
        "key",
        "tokens",
        "pass",
    ],
)
def test_a_key_that_only_resembles_one_is_shown(key: str) -> None:
    assert without_secrets({key: 4096}) == {key: 4096}


@pytest.mark.parametrize("key", ["openai_key", "revision", "answer"])
def test_under_any_other_key_nothing_is_hidden_whatever_it_looks_like(key: str) -> None:
    assert without_secrets({key: "sk-proj-aBcDeFgHiJkLmNoP1234"}) == {key: "sk-proj-aBcDeFgHiJkLmNoP1234"}


def test_a_section_of_secrets_keeps_its_keys() -> None:
    assert without_secrets({"credentials": {"user": "me", "none": None}}) == {
        "credentials": {"user": "***", "none": None}
    }


def test_a_secret_that_is_not_set_is_shown_as_not_set() -> None:
    assert without_secrets({"api_key": None}) == {"api_key": None}


def test_the_config_itself_is_left_as_it_was() -> None:
    config = {"api_key": "abc"}
    without_secrets(config)
    assert config == {"api_key": "abc"}


def test_a_text_is_shown_as_it_is() -> None:
    config = {"note": "password=opensesame", "names": ["Bearer abc", "a: b"], "url": "https://me:word@example.org"}
    assert without_secrets(config) == config


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["fit", "--reward.api_key=a;b c", "--seed", "1"], ["fit", "--reward.api_key=***", "--seed", "1"]),
        (["--my.hf_token", "x y", "--seed", "1"], ["--my.hf_token", "***", "--seed", "1"]),
        (["--reward", "{api_key: abc}"], ["--reward", "{api_key: abc}"]),  # a text, which is not searched
        (["password=abc"], ["password=***"]),
    ],
)
def test_a_command_s_arguments_are_shown_without_secrets(arguments: list[str], shown: list[str]) -> None:
    assert arguments_without_secrets(arguments) == shown


def test_a_command_in_a_list_is_shown_without_secrets() -> None:
    assert without_secrets({"run": ["my", "--api_key", "open sesame"]}) == {"run": ["my", "--api_key", "***"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("think_token", "abc"),
        ("password_file", "/run/password"),
        ("secret_name", "abc"),
        ("tokens", {"a": 1, "b": [2.0, None]}),
    ],
)
def test_what_is_not_a_secret_though_its_key_is_of_one_is_shown(key: str, value: Any) -> None:
    assert without_secrets({key: value}) == {key: value}


def test_of_tokens_that_are_not_all_numbers_each_is_hidden() -> None:
    assert without_secrets({"tokens": {"a": 1, "b": "c"}}) == {"tokens": {"a": "***", "b": "***"}}
