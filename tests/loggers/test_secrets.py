"""What of a config is hidden."""

from __future__ import annotations

import pytest

from rlflow.loggers.log_lines import line_log
from rlflow.loggers.secrets import arguments_without_secrets, text_without_secrets, without_secrets


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
        "openai_key",
        "OPENAI_KEY",
        "AZURE_OPENAI_KEY",
        "MY_OWN_KEY",
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


# Made up, in the shapes that the services give theirs.
SHAPES = [
    "hf_" + "aBcDeFgHiJkLmNoPqRsT",
    "sk-proj-" + "abcd1234efgh5678",
    "sk-ant-api03-" + "abcd1234-efgh_5678",
    "ghp_" + "abcdefghijklmnop1234",
    "github_pat_" + "11ABCDEFG0abcdefghij",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    "xoxb-" + "123456789012-abcdefghijkl",
    "glpat-" + "abcdefghij0123456789",
    "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0" + ".abc_DEF-123",
    "SG." + "aBcDeFgHiJkLmNoPqRsTuV" + ".aBcDeFgHiJkLmNoPqRsTuVwXyZ",
    "dapi" + "0123456789abcdef" * 2,
    "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SHAPES)
def test_a_secret_is_known_by_its_shape_whatever_key_and_text_it_stands_in(secret: str) -> None:
    assert without_secrets({"note": [f"of {secret}"]}) == {"note": ["of ***"]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bearer abcdef123456", "Bearer ***"),
        ("https://h.org/x?token=abc&page=2", "https://h.org/x?token=***&page=2"),
        ("postgres://user:word@host/db", "postgres://***@host/db"),
        ("host=h password=opensesame", "host=h password=***"),
        ("{'api_key': 'opensesame', 'n': 1}", "{'api_key': '***', 'n': 1}"),
        ("ValueError: password=opensesame", "ValueError: password=***"),
        ("tokens: [opensesame, 'open sesame'], n: 1", "tokens: [***], n: 1"),
        ("passwords: {a: opensesame, b: [c, d]}, n: 1", "passwords: {***}, n: 1"),
        ('{"password": ["open sesame", "]"], "n": 1}', '{"password": [***], "n": 1}'),
        ('{"body": "{\\"password\\": \\"open sesame\\"}"}', '{"body": "{\\"password\\": \\"***\\"}"}'),
        ("passwords:\n- open sesame\n- opensesame\nn: 1", "passwords:\n***\nn: 1"),
        ("Authorization: Token opensesame, n: 1", "Authorization: ***, n: 1"),
        (r"password='open\'sesame' n=1", "password='***' n=1"),
        ("password='''open 'sesame''' n=1", "password='***' n=1"),
        ("password='open sesame, of which the end is", "password='***'"),
        ("AZURE_OPENAI_KEY=" + "0123456789abcdef" * 2, "AZURE_OPENAI_KEY=***"),
        ("my_key: aBcDeFgHiJkLmNoPqRsT0123, n: 1", "my_key: ***, n: 1"),
        ("failed: ['run', '--api_key', 'open sesame', '--n', '1']", "failed: ['run', '--api_key', '***', '--n', '1']"),
        ("failed: run --api_key opensesame --n 1", "failed: run --api_key *** --n 1"),
        ("password: |\n  open\n  sesame\nn: 1", "password: ***\nn: 1"),
        ("password: >-\n  open sesame", "password: ***"),
        ("password: !str opensesame, n: 1", "password: ***, n: 1"),
        ("passwords: &all !!seq [open, sesame], n: 1", "passwords: ***, n: 1"),
        ("password: !open, n: 1", "password: ***, n: 1"),
        ("password: !open ", "password: *** "),
        ("{password => opensesame, n => 1}", "{password => ***, n => 1}"),
        ("token=SecretStr('open sesame') n=1", "token=*** n=1"),
        ("api_key=SecretStr( 'open sesame, of which the end is", "api_key=***"),
        ("[('api_key', 'open sesame'), ('n', 1)]", "[('api_key', '***'), ('n', 1)]"),
        ('os.environ.setdefault("HF_TOKEN", "opensesame")', 'os.environ.setdefault("HF_TOKEN", "***")'),
    ],
)
def test_a_secret_within_a_text_is_hidden_and_the_rest_is_shown(text: str, shown: str) -> None:
    assert text_without_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen2.5-0.5B-Instruct",
        "/data/task-skills/sk-learn/rows.jsonl",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "https://example.org/data?page=2",
        "`actor.lr` is 1e-6: give more",
        "the bearer of good news; tokens: 5, eos_token: <end>",
        "tokens: [1, 2], pass: 3 of 4; too many tokens: give fewer; password: null",
        "`--api_key` is missing; `sort_key: name`, answer_key: solution_of_problem_2",
        "sk-learn-is-a-library-of-models",
        "api_key = os.environ['HF_TOKEN'], token=os.getenv(\"HF_TOKEN\")",
        "('eos_token', 'end'), ('n', 'password'), Importance('token', 'truncate')",
    ],
)
def test_a_text_without_a_secret_is_shown_as_it_is(text: str) -> None:
    assert text_without_secrets(text) == text


def test_hexadecimal_digits_are_a_secret_under_a_key_and_a_digest_elsewhere() -> None:
    digits = "0123456789abcdef0123456789abcdef01234567"
    assert without_secrets({"wandbKey": digits, "key": digits}) == {"wandbKey": "***", "key": "***"}
    assert without_secrets({"revision": digits}) == {"revision": digits}


def test_a_section_of_secrets_keeps_its_keys() -> None:
    assert without_secrets({"credentials": {"user": "me", "none": None}}) == {
        "credentials": {"user": "***", "none": None}
    }


def test_a_secret_that_is_not_set_is_shown_as_not_set() -> None:
    assert without_secrets({"api_key": None}) == {"api_key": None}


def test_the_login_of_a_url_is_hidden() -> None:
    assert without_secrets("https://me:pass@example.org/data") == "https://***@example.org/data"


def test_the_config_itself_is_left_as_it_was() -> None:
    config = {"api_key": "abc"}
    without_secrets(config)
    assert config == {"api_key": "abc"}


def test_a_command_s_arguments_are_shown_without_secrets() -> None:
    arguments = ["fit", "--reward.api_key=a;b c", "--my.hf_token", "x y", "--seed", "1", "--names+=" + SHAPES[0]]
    shown = ["fit", "--reward.api_key=***", "--my.hf_token", "***", "--seed", "1", "--names+=***"]
    assert arguments_without_secrets(arguments) == shown


def test_a_command_in_a_list_is_shown_without_secrets() -> None:
    assert without_secrets({"run": ["my", "--api_key", "open sesame"]}) == {"run": ["my", "--api_key", "***"]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token", "<think>"),
        ("user_token", "<|im_end|>"),
        ("token", "[MASK]"),
        ("think_token", "abc"),
        ("password_file", "/run/password"),
        ("secret_name", "abc"),
        ("auth", "none"),
        ("webhook", "off"),
    ],
)
def test_what_is_no_secret_though_its_key_is_of_one_is_shown(key: str, value: str) -> None:
    assert without_secrets({key: value}) == {key: value}
    assert text_without_secrets(f"invalid {key}: {value}, n: 1") == f"invalid {key}: {value}, n: 1"


def test_numbers_of_tokens_are_shown_and_other_tokens_hidden() -> None:
    assert without_secrets({"tokens": {"a": 1, "b": [2.0, None]}}) == {"tokens": {"a": 1, "b": [2.0, None]}}
    assert without_secrets({"tokens": {"a": 1, "b": "c"}}) == {"tokens": {"a": "***", "b": "***"}}


def test_a_warning_that_quotes_a_reward_is_one_line_that_only_reads(caplog: pytest.LogCaptureFixture) -> None:
    line_log("rlflow.of_a_test").warning("it said %s", "\x1b[31mred\nrlflow: error: forged\npassword=opensesame")
    assert caplog.messages == ["it said \\x1b[31mred\\nrlflow: error: forged\\npassword=***"]
