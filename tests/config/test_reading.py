"""Reading of a config, before any object is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlflow.config.command_line import Text, as_yaml, layers, read
from rlflow.errors import UserError


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x: " + "[" * 5000, "which is nested too deeply; correct it"),
        ("seed: 1\ndata: {}\nseed: 2\n", "which is not plain YAML (it has `seed` twice, in lines 1 and 3); correct it"),
        (
            "data: {prompt: a, prompt: b}\n",
            "which is not plain YAML (it has `data.prompt` twice, in lines 1 and 1)",
        ),
        (
            "a: [{}, {b: {c: 1, d: 2, c: 3}}]\n",
            "which is not plain YAML (it has `a.1.b.c` twice, in lines 1 and 1)",
        ),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}\n", "which is not plain YAML (it has `b.<<` twice, in lines 2 and 2)"),
        (
            "seed: 0\n---\nseed: 1\n",
            "which is not plain YAML (expected a single document in the stream",
        ),
        ("x: 'é\x00'", "which is not plain YAML (unacceptable character"),
        (
            "a: 1\nx: !foo 3",
            "which is not plain YAML (could not determine a constructor for the tag '!foo', line 2); correct it",
        ),
        ("x: !!int five", "which is not plain YAML (invalid literal for int() with base 10: 'five'); correct it"),
        (
            "a: 1\nb: {{ x }}",
            "while constructing a mapping, found unhashable key, line 2",
        ),
        ("é".encode("latin-1"), "which is not UTF-8 at byte 0; save it as UTF-8"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) and value.startswith("which") else "",
)
def test_a_file_that_is_not_a_config_is_refused_in_one_line(text: str | bytes, line: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=re.escape(line)) as refused:
        layers(["--config", str(file)])
    assert str(refused.value).startswith(f"`--config` is {str(file)!r}, ")
    assert "\n" not in str(refused.value)


def test_a_mapping_may_be_merged_into_another(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n")
    (tree,) = layers(["--config", str(tmp_path / "my.yaml")])
    assert tree["b"] == {"x": 1, "y": 3}


def test_a_number_with_an_exponent_is_one_and_a_date_is_a_text() -> None:
    values = [Text(text).value for text in ("1e-5", "2E3", "-1.5e+2", "2020-01-02", "12e", "0x1F", "on", "1:30", "010")]
    assert values == [1e-5, 2000.0, -150.0, "2020-01-02", "12e", 31, True, "1:30", "010"]


def test_a_config_is_written_so_that_its_texts_are_read_as_texts() -> None:
    config = {"texts": ["1e-5", "1.5E3", "010", "1:30", "yes", "2001-01-01", "null", "x"], "numbers": [1e-5, 10, True]}
    assert read(as_yaml(config)) == config
