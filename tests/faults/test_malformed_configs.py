"""A wrong config ends with exit code 2 and one line that names the key and the value, before a model is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlflow.models.causal_lm import ScoringModel
from tests.bad_input.refusal import refusal
from tests.faults.running import COMMAND, Running
from tests.faults.wrong_configs import ALL, OWN, Wrong
from tests.own_folder import forgotten, make, write
from tests.slow import slow_but

pytestmark = pytest.mark.row("malformed configs")
MOST_BYTES, MOST_S = 2**30, 10.0
WALL_S = 60.0  # where others have the cores too
# How a line says what is legal: a bound, a form, the nearest name, all names, or what to do.
LEGAL = re.compile(
    r"; (give|name|write|set|check|save it as|correct|lower|leave one out|make|take)\b|To keep all, raise"
    r"|Did you mean|Known here: |Write module.Class|its roles are |, so (give|the metric)|For more use `"
    r"|Raise `data\.\w+` to at least \d+|an option is `"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    make(folder)
    os.mkfifo(folder / "fifo")
    (folder / "empty").mkdir()
    (folder / "second.yaml").write_text("trainer: {max_steps: late}\n")
    with forgotten(folder):  # `main` puts the folder on the path
        yield folder


def write_case(folder: Path, case: Wrong) -> None:
    if case.content is None:
        write(folder / "my.yaml", case.changes)
    else:
        content = case.content if isinstance(case.content, bytes) else case.content.encode()
        (folder / "my.yaml").write_bytes(content)


@pytest.mark.parametrize("case", slow_but(ALL[::5], ALL), ids=[case.name for case in ALL])
def test_a_wrong_config_is_refused_in_one_line_and_no_model_is_loaded(
    case: Wrong,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    counted: Callable[..., None],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    loaded: list[Path] = []
    monkeypatch.setattr(ScoringModel, "load", lambda path, *_: loaded.append(path))
    write_case(folder, case)
    before = {path.name for path in folder.iterdir()}
    line = refusal(capfd, "fit", "--config", "my.yaml", *case.options)
    assert case.line in line
    assert LEGAL.search(line), line
    for key, value in case.changes.items():
        keys = key.split(".")
        assert any(".".join(keys[:count]) in line for count in (len(keys), len(keys) - 1)), line
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            assert repr(value)[1:40] in line or str(value)[:40] in line, line
    assert loaded == []
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} <= before  # nor does it leave anything
    counted("wrong configs and options refused in one line with key, value and what is legal", case.name)


def test_more_than_a_hundred_wrong_configs_are_tried() -> None:
    assert len({case.name for case in ALL}) == len(ALL) > 100


# Calls a command, and prints the memory in KiB that its largest process took, and the processors' seconds of all.
MEASURES = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "options"),
    [
        (OWN.replace("seed: 0", "seed: -1"), ()),
        (OWN.replace("seed: 0", "seed: " + "y" * 200_000), ("--trainer.max_stepz", "f" * 100_000)),
        (OWN, ("--module.actor.temperature", ".inf")),
        (OWN, ("--module.actor.model", "nobody/nothing")),
    ],
    ids=[
        "a seed",
        "long words",
        "a temperature",
        "a hub name without a network",
    ],
)
def test_a_command_with_a_wrong_config_ends_with_2_in_10_seconds_and_1_gb(
    tmp_path: Path, content: str, options: tuple[str, ...], measured: Callable[[str, float], None]
) -> None:
    make(tmp_path)
    (tmp_path / "my.yaml").write_text(content)
    command = (sys.executable, "-c", MEASURES, *COMMAND)
    ended = Running(tmp_path, "fit", "--config", "my.yaml", *options, command=command).ended()
    assert ended.code == 2
    (line,) = ended.errors.splitlines()
    assert line.startswith("rlflow: error: `")
    kib, busy = ended.output.split()[-2:]
    assert int(kib) * 1024 < MOST_BYTES
    assert float(busy) < MOST_S
    assert ended.seconds < WALL_S
    measured("{:.0f} MB", int(kib) * 1024 / 1e6)
    measured("{:.1f} s of a processor", float(busy))
    measured("{:.1f} s by the clock", ended.seconds)
