"""The commands as a user gives them: real processes in the user's own folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import pytest

from rlflow.cli import _print_error, main
from rlflow.process import supervisor
from tests.own_folder import TWO_RANKS, make, rewarded_by, write

HERE = re.escape(socket.gethostname())
ROOT = Path(__file__).parent.parent
TIMEOUT_S = 240
ENDS_WITHIN_S = 20.0  # the launcher promises 5, on a machine that is not busy; a timeout takes minutes


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code, what it wrote, and when."""

    code: int
    output: str
    errors: str
    at: float


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`rlflow` with these arguments, in `folder`."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "MASTER_PORT")}
    return subprocess.Popen(
        [sys.executable, "-m", "rlflow.cli", *arguments],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> Ended:
    """Wait for it."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()  # its ranks follow it
    return Ended(process.returncode, output, errors, time.time())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of a user's own for each run."""
    changes = {
        "runs": {"module.class_path": "my_algorithm.ShortGRPO", **TWO_RANKS},
        "raises on rank 1": rewarded_by("raises_on_rank_1") | TWO_RANKS,
        "killed on rank 1": rewarded_by("killed_on_rank_1") | TWO_RANKS,
        "leaves on rank 0": rewarded_by("leaves") | TWO_RANKS,
    }
    made = {name: tmp_path_factory.mktemp("own") for name in changes}
    for name, folder in made.items():
        make(folder)
        write(folder / "my.yaml", changes[name])
    return made


@pytest.fixture(scope="module")
def ends(folders: dict[str, Path]) -> Callable[[str], Ended]:
    """End of `rlflow fit` on two ranks in a folder; each is run once."""
    return cache(lambda name: end(start(folders[name], "fit", "--config", "my.yaml")))


def test_a_user_s_own_algorithm_trains_from_the_folder_of_its_config(
    folders: dict[str, Path], ends: Callable[[str], Ended]
) -> None:
    assert ends("runs").code == 0, ends("runs").errors
    metrics = [json.loads(line) for line in (folders["runs"] / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert [entry["reward/brevity"] < 0 for entry in metrics] == [True, True]


def test_a_run_says_nothing_on_the_terminal_but_its_own_lines(ends: Callable[[str], Ended]) -> None:
    assert ends("runs").errors == ""
    first_words = [line.split()[0] for line in ends("runs").output.splitlines() if not line.endswith(" ...")]
    memory = ["memory", "actor", "training", "engine"]
    assert first_words == ["ranks", "per", "actor:", *memory, "the", "before", "a", "step", "step", "steps", "left"], (
        ends("runs").output
    )


@pytest.mark.slow
def test_a_reward_that_raises_on_one_rank_ends_the_run_in_one_line(ends: Callable[[str], Ended]) -> None:
    ended = ends("raises on rank 1")
    assert ended.code == 2, ended.errors
    (line,) = ended.errors.splitlines()
    assert line.startswith("rlflow: error: reward `my_rewards.raises_on_rank_1` failed on sample 0 with KeyError")
    assert re.search(r"\(what it read is stored: rlflow replay \S+ --step 1 --node rewards\)$", line)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_in_time_with_its_name(
    folders: dict[str, Path], ends: Callable[[str], Ended]
) -> None:
    ended = ends("killed on rank 1")
    assert ended.code == 1
    killed = rf"rank 1 on {HERE} was killed by SIGKILL"
    line = rf"{killed} \(step 1, run rewards: ranks 0-1, .*\); ended the other ranks"
    assert re.fullmatch(line, ended.errors.splitlines()[-1])
    died_at = float((folders["killed on rank 1"] / "killed.txt").read_text().split()[-1])
    assert ended.at - died_at < ENDS_WITHIN_S


@pytest.mark.slow
def test_a_reward_that_leaves_with_code_0_on_rank_0_is_named_and_the_run_has_failed(
    ends: Callable[[str], Ended],
) -> None:
    ended = ends("leaves on rank 0")
    assert ended.code == 1
    (line,) = ended.errors.splitlines()
    left = rf"rlflow: error: rank 0 on {HERE} exited with code 0"
    assert re.fullmatch(rf"{left} \(step 1, run rewards: .*\), before the run came to its end", line)


def ends_at_its_reward(folder: Path, reward: str, *arguments: str) -> int | None:
    """The exit code of `rlflow` where the module of the config's reward, while it is imported, does this."""
    make(folder)
    (folder / "my_rewards.py").write_text(f"import os, sys, threading, time\n{reward}\n")
    write(folder / "my.yaml", rewarded_by("points"))

    def command() -> None:
        os.chdir(folder)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        sys.argv = ["rlflow", *arguments, "--config", "my.yaml"]
        supervisor.EXIT_S = 0.5
        main()

    process = get_context("fork").Process(target=command)  # what it needs is imported
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


@pytest.mark.parametrize(
    ("reward", "code", "line"),
    [
        (
            "os._exit(0)",
            1,
            rf"rank 0 on {HERE} exited with code 0 \(before its first step\), before the run came to its",
        ),
        ("sys.exit(0)", 2, r"rank 0 called `sys.exit\(0\)` \(before its first step\), before the run came to its end"),
    ],
)
def test_code_0_before_the_end_of_a_run_is_a_failure(
    reward: str, code: int, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ends_at_its_reward(tmp_path, reward, "fit") == code
    assert re.match(f"rlflow: error: {line}", capfd.readouterr().err)


def test_a_thread_that_outlives_a_run_is_ended_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uploads = "threading.Thread(target=time.sleep, args=(50,), name='uploads').start()\nsys.exit(0)"
    assert ends_at_its_reward(tmp_path, uploads, "fit") == 2
    assert re.match(rf"rlflow: rank 0 on {HERE}: thread uploads still ran", capfd.readouterr().err.splitlines()[-1])


def test_a_terminal_that_is_gone_changes_no_exit_code(tmp_path: Path) -> None:
    full = "full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2); sys.exit(0)"
    assert ends_at_its_reward(tmp_path, full, "fit") == 2


def test_a_closed_pipe_is_not_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)"
    points = "\ndef points(response, row): return 1.0"
    assert ends_at_its_reward(tmp_path, gone + points, "graph") == 141
    assert capfd.readouterr().err == ""


def test_a_text_of_others_can_forge_no_line_and_does_nothing_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_error("Traceback:\nKeyError: \x1b[2J\nrlflow: error: forged, \ragain\n  rlflow stays")
    shown = "Traceback:\nKeyError: \\x1b[2J\n  rlflow: error: forged, \\ragain\n  rlflow stays\n"
    assert capsys.readouterr().err == shown


def test_help_imports_neither_engine_nor_deepspeed_nor_wandb() -> None:
    script = (
        "import sys, contextlib, io, rlflow\n"
        "from rlflow.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as help:\n"
        "    main(['--help'])\n"
        "assert 'fit' in help.getvalue()\n"
        "print(sorted({'vllm', 'deepspeed', 'wandb', 'transformers', 'lightning'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_of_a_run_imports_no_transformers_dtensor_or_fabric_ddp() -> None:
    script = (
        "import sys, contextlib, io\n"
        "from rlflow.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as help:\n"
        "    main(['fit', '--help'])\n"
        "assert 'Maximum number of steps' in help.getvalue()\n"
        "unwanted = {'transformers', 'torch._dynamo', 'torch.distributed.tensor', 'lightning.fabric.strategies.ddp'}\n"
        "print(sorted(unwanted & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ctrl_c_in_a_command_that_saves_nothing_is_one_line_and_code_130(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # this process may have it ignored
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'rlflow.commands.graph':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "rlflow.cli", "graph", "--config", "my.yaml"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "rlflow: ended by SIGINT\n")


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m rlflow.cli fit"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "rlflow: error: the folder that the command was started in is gone; change to one that is there"
    ]
