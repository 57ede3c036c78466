"""What is read of a config before anything is made of it, and what is not."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rlflow.config.layers import Text, layers
from rlflow.config.reading import MOST_BYTES
from rlflow.errors import UserError

# Ten entries, each of them ten of the one before, nine times: a billion once they are expanded.
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
MERGED = "m0: &m0 {k: 1}\n" + "".join(f"m{i}: &m{i}\n  <<: *m{i - 1}\n  p: *m{i - 1}\n" for i in range(1, 25))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            LAUGHS,
            "which holds more than 20,000 entries in `a4` (line 5) once its aliases (`*name`) are expanded; write what",
        ),
        (MERGED, "which holds more than 20,000 entries in `m12` (line 35)"),
        ("trainer: &t\n  placement: *t\n", "which refers to itself (line 1); write the value out"),
        ("y: 1\nx: " + "[" * 5000 + "]" * 5000, "which is nested too deeply (line 2); give at most 50 levels"),
        ("x: " + "[" * 50 + "]" * 50, "which is nested too deeply (line 1); give at most 50 levels"),
        ("seed: 1\ndata: {}\nseed: 2\n", "which has `seed` twice, in lines 1 and 3; leave one out"),
        ("data: {prompt: a, prompt: b}\n", "which has `data.prompt` twice, in lines 1 and 1; leave one out"),
        ("seed: 0\n---\nseed: 1\n", "which is not YAML (expected a single document in the stream, but found another"),
        (
            "x: !!python/object/apply:os.system [ls]\n",
            "which holds what a config has not (line 1): !!python/object/apply:os.system; write plain YAML",
        ),
        ("x: " + "9" * 5000, "which has `x` of 5,000 digits (line 1); give 40 at most"),
        ("a: 1\nx: {y: !!bool five}", "in which `x.y` is `!!bool five` (line 2); give true or false"),
        ("a: 1\nx: [!!float five]", "in which `x.0` is `!!float five` (line 2); give a number, such as 0.5"),
        ("a: 1\nx: 0b_", "in which `x` is `0b_` (line 2); give an integer, such as 3"),
        ("!!int hello", "in which a value is `!!int hello` (line 1); give an integer, such as 3"),
        ("!!int hello: 1", "in which `hello` is `!!int hello` (line 1); give an integer, such as 3"),
        ("a: 1\nx: !!int {y: 1}", "which holds what a config has not (line 2): !!int {y: 1}; write plain YAML"),
        ("a: 1\nx: !!seq y", "which holds what a config has not (line 2): !!seq y; write plain YAML"),
        (
            "a: {{ x }}",
            "which has the key `a.{ x }` (line 1), and a key must be text; write a name without brackets, or a text in",
        ),
        ("a:\n  NULL: 1", 'has the key `a.NULL` (line 2), and a key must be text; write "NULL", in quotes'),
        ("!foo x: 1", "which holds what a config has not (line 1): !foo; write plain YAML"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}\n", "which has `b.<<` twice, in lines 2 and 2"),
        ("x: 'é\x00'", "which is not YAML (unacceptable character"),
        ("é".encode("latin-1"), "which is not UTF-8 at byte 0; save it as UTF-8"),
        (f"x: {'y' * MOST_BYTES}", "a config has at most 262,144; name a config"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) and "; " in value else "",
)
def test_a_file_that_is_no_config_is_refused_at_once(text: str | bytes, line: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.perf_counter()
    with pytest.raises(UserError, match=re.escape(line)) as refused:
        layers(["--config", str(file)])
    assert str(refused.value).startswith(f"`--config` is {str(file)!r}, ")
    assert "\n" not in str(refused.value)
    assert time.perf_counter() - began < 5


def test_a_mapping_may_be_merged_into_another(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n")
    (layer,) = layers(["--config", str(tmp_path / "my.yaml")])
    assert layer.tree["b"] == {"x": 1, "y": 3}


def test_a_config_may_have_50_levels(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("x: " + "[" * 49 + "1" + "]" * 49)
    (layer,) = layers(["--config", str(tmp_path / "my.yaml")])
    assert str(layer.tree["x"]) == "[" * 49 + "1" + "]" * 49


def test_a_number_with_an_exponent_is_one_and_a_date_is_a_text() -> None:
    values = [Text(text).value for text in ("1e-5", "2E3", "-1.5e+2", "2020-01-02", "12e", "0x1F", "on", "1:30", "010")]
    assert values == [1e-5, 2000.0, -150.0, "2020-01-02", "12e", 31, True, "1:30", "010"]
