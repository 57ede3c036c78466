"""`rlflow replay` of a run whose files are damaged: one line with the file's path, and code 2."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlflow.cli import main
from tests.commands.test_replay import CONFIG, MINE
from tests.own_folder import command
from tests.slow import slow_but

STEP = "inputs/step-00000002"
RANK0 = "-00000-of-00001"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder where a run of one rank has kept steps 1 and 2, and has ended in step 3."""
    folder = tmp_path_factory.mktemp("damaged")
    config = {
        **CONFIG,
        "trainer": {**CONFIG["trainer"], "devices": 1},
        "strategy": {"class_path": "rlflow.strategies.SingleProcess"},
    }
    (folder / "mine.py").write_text(MINE)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="it does not like prompt 11"):
        command(folder, "fit", "--config", "config.yaml")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test is."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `rlflow replay run` with options; the one line that it ends with, and code 2."""

    def run(*options: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["replay", "run", *options])
        printed = capsys.readouterr().err.splitlines()
        assert (ended.value.code, len(printed)) == (2, 1), printed
        return printed[0]

    return run


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def other_json(file: Path) -> None:
    file.write_text('{"spaces": {}}')


DAMAGES = [cut, flip, empty, Path.unlink]
OF_RANK = ["rewards", "rewards.made"]
FILES = [f"{name}{RANK0}{end}" for name in OF_RANK for end in (".json", ".safetensors")]
FILES += ["rewards.state.json", "rewards.state.safetensors", "rewards.json", "rewards.made.json"]
GONE_IS_NOT_KEPT = ("rewards.json", "rewards.made.json", f"rewards{RANK0}.json")  # other lines say so


@pytest.mark.parametrize(
    ("name", "damage"),
    slow_but(
        [*zip(FILES, itertools.cycle((cut, flip, empty))), (FILES[-3], Path.unlink)],
        [(n, d) for n in FILES for d in DAMAGES if d is not Path.unlink or n not in GONE_IS_NOT_KEPT],
    ),
)
def test_damaged_inputs_are_named(
    folder: Path, refused: Callable[..., str], name: str, damage: Callable[[Path], object]
) -> None:
    damage(Path("run", STEP, name))
    assert f"run/{STEP}/{name} " in refused("--step", "2", "--node", "rewards")


@pytest.mark.parametrize(  # a state may be anything
    ("name", "damage"),
    slow_but(
        [(FILES[0], other_json), (FILES[1], cut), (FILES[4], empty)],
        [(n, d) for n in FILES for d in (cut, empty, other_json) if d is not other_json or "state" not in n],
    ),
)
def test_inputs_without_digests_are_named_if_they_cannot_be_read(
    folder: Path, refused: Callable[..., str], name: str, damage: Callable[[Path], object]
) -> None:
    without_digests(Path("run", STEP))
    damage(Path("run", STEP, name))
    assert re.search(
        rf"run/{STEP}/rewards\S*\.json or a file next to it cannot be read|run/{STEP}/{name}",
        refused("--step", "2", "--node", "rewards"),
    )


def without_digests(step: Path) -> None:
    for file in step.glob("*.written.json"):
        file.unlink()
    for file in step.glob("*.json"):
        content = json.loads(file.read_text())
        content.pop("sha256", None)
        file.write_text(json.dumps(content))


def test_a_run_without_digests_is_replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_digests(Path("run", STEP))
    main(["replay", "run", "--step", "2", "--node", "rewards"])
    assert "rewards: 16 rows, equal to the run's, to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("damage", [cut, empty])
def test_damaged_digests_are_named(folder: Path, refused: Callable[..., str], damage: Callable[[Path], object]) -> None:
    damage(Path("run", STEP, f"rewards{RANK0}.written.json"))
    assert f"run/{STEP}/rewards{RANK0}.written.json is damaged" in refused("--step", "2", "--node", "rewards")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"a: [", "which is not plain YAML"),
        (b"- 1", "which holds no `key: value` lines but [1]"),
        (b"", "which holds no `key: value` lines but None"),
        (b"\xff", "which cannot be read"),
        (b"trainer: 3", "whose `trainer` is 3"),
        (b"trainer: {}\nstrategy: a", "whose `strategy` is 'a'"),
        (b"trainer: {}\nstrategy: {init_args: 3}", "whose `strategy.init_args` is not a mapping"),
    ],
)
def test_a_damaged_config_of_the_run_is_named(
    folder: Path, refused: Callable[..., str], text: bytes, found: str
) -> None:
    Path("run/config.yaml").write_bytes(text)
    assert f"the config of the run is run/config.yaml, {found}" in refused("--step", "2")


def test_a_wrong_key_in_the_config_of_the_run_is_named_with_its_file(folder: Path, refused: Callable[..., str]) -> None:
    file = Path("run/config.yaml")
    file.write_text(file.read_text().replace("prompts_per_step:", "prompts_per_stfp:"))
    said = refused("--step", "2")
    assert "prompts_per_stfp" in said
    assert said.endswith("(the config of the run: run/config.yaml)")


def test_a_node_that_is_asked_for_and_needs_a_checkpoint_that_is_gone_is_an_error(
    folder: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("run/checkpoint")
    said = refused("--step", "2", "--node", "actor_loss")
    assert "`--node` is 'actor_loss', which needs a model: run has no checkpoint after 1 steps or fewer" in said
    main(["replay", "run", "--step", "2"])
    assert "actor_loss: left out, for want of weights" in capsys.readouterr().out


def test_a_checkpoint_of_which_a_bit_flipped_is_not_loaded(
    folder: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = next(Path("run/checkpoint/step-00000001").glob("actor*.safetensors"))
    flip(file)
    said = refused("--step", "2", "--node", "actor_loss")
    assert f"{file.parent} has another SHA-256 of {file.name} than state.json says, so it is passed over" in said
    assert "no other checkpoint after 1 steps or fewer" in said
    main(["replay", "run", "--step", "2", "--node", "rewards"])
    assert "rewards: 16 rows, equal to the run's, to the bit" in capsys.readouterr().out


@pytest.mark.parametrize("text", [b"\0\0\0\0\n", b"{\n"])
def test_damaged_metrics_of_the_run_are_one_line(folder: Path, refused: Callable[..., str], text: bytes) -> None:
    Path("run/metrics.jsonl").write_bytes(text)
    assert "run/metrics.jsonl is damaged: line 1" in refused("--step", "1", "--node", "actor_loss")
