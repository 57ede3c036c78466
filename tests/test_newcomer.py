"""A newcomer's first hour, by README alone: an algorithm, rewards, two datasets, a tool, a report, an export."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
RLFLOW = [sys.executable, "-m", "rlflow.cli"]
REWARD = '''
def exact(response, answer):
    """1 for the answer, else half of the share of digits."""
    said = response.strip()
    return 1.0 if said == answer else 0.5 * sum(letter.isdigit() for letter in said) / max(1, len(said))


'''
GREEDY = """
import json, sys
library, folder, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if library == "vllm":
    from vllm import LLM, SamplingParams
    model = LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True)
    asked = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    made = [each.outputs[0].token_ids for each in model.generate([{"prompt_token_ids": ids} for ids in prompts], asked)]
else:
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "eos_token_id": None}
    made = [model.generate(torch.tensor([ids]), **asked)[0, len(ids):].tolist() for ids in prompts]
json.dump([list(each) for each in made], open(sys.argv[4], "w"))
"""


def blocks(folder: Path, section: str) -> list[str]:
    """The code of a section of the clone's README, in order."""
    text = (folder / "clone/README.md").read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)


def ran(*command: str, folder: Path) -> str:
    """The output of a command, which ends well and runs the code of the clone."""
    installed = str(folder / "installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": installed}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commanded(name: str, folder: Path, *more: str, number: int = 0) -> str:
    """The output of the README's command of this name on the newcomer's files, the first or a later one."""
    *_, shell = blocks(folder, "Your own data, reward and tool")
    commands = [shlex.split(line, comments=True) for line in shell.replace("\\\n", "").splitlines()]
    (*_, command) = [each for each in commands if each[1] == name][: number + 1]
    return ran(*RLFLOW, *command[1:], *more, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the newcomer has cloned the repository, installed it, written files and trained."""
    folder = tmp_path_factory.mktemp("newcomer")
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone of the repository")
    ran("git", "clone", "--quiet", str(ROOT), "clone", folder=folder)
    pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"
    ran(*pip, "--target", "installed", "./clone", folder=folder)  # what it needs is here already
    algorithm, config, _ = blocks(folder, "Write your own algorithm")
    mine, tool, _ = blocks(folder, "Your own data, reward and tool")
    files = {"my_algorithm.py": algorithm, "my.yaml": config, "mine.yaml": mine, "my_functions.py": REWARD + tool}
    for name, sign in ("sums", 1), ("others", -1):
        rows = [
            {"prompt": f"{a}{'+' if sign > 0 else '-'}{b}=", "answer": str(a + sign * b)}
            for a in range(9) for b in range(a)
        ]  # fmt: skip
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        files["held_out.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows[:12])
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    where = ran(sys.executable, "-c", "import rlflow; print(rlflow.__file__)", folder=folder)
    assert Path(where.strip()).is_relative_to(folder / "installed")
    commanded("fit", folder)
    return folder


def test_the_reward_of_two_datasets_rises(folder: Path) -> None:
    steps = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward/mean" in step]
    assert len(steps) == 40
    for name in "reward/mean", "reward/sums/mean", "reward/others/mean":
        first, last = ([step[name] for step in part if name in step] for part in (steps[:10], steps[-10:]))
        error = (statistics.variance(first) / len(first) + statistics.variance(last) / len(last)) ** 0.5
        assert statistics.mean(last) - statistics.mean(first) > 2 * error, name
    assert all("reward/price" in step for step in steps)  # which the algorithm logs


def test_a_tool_takes_part_in_a_step(folder: Path) -> None:
    commanded("fit", folder, "--trainer.max_steps", "1", number=1)
    lines = [json.loads(line) for line in (folder / "runs/tool/metrics.jsonl").read_text().splitlines()]
    assert any({"rollout/tool_calls", "reward/sums/mean", "reward/others/mean"} <= line.keys() for line in lines)
    (sample, *_) = (folder / "runs/tool/samples.jsonl").read_text().splitlines()
    assert "Tools: add(numbers)" in json.loads(sample)["prompt"]


def test_a_browser_opens_the_report(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    commanded("report", folder)
    page = (folder / "runs/mine/report.html").as_uri()
    options = "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"
    shown = subprocess.run(
        [browser, *options, f"--user-data-dir={folder / 'profile'}", page], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert "reward/others/mean" in shown.stdout


def test_the_model_is_scored_exported_and_the_same_in_transformers_and_vllm(folder: Path) -> None:
    assert "pass@2" in commanded("test", folder)
    commanded("export", folder)
    assert (folder / "exported" / "README.md").is_file()
    prompts, made = json.dumps([[1, 5, 9, 12], [7, 3], [20, 21, 22, 23, 24, 25, 26]]), {}
    for library in "transformers", "vllm":
        ran(sys.executable, "-c", GREEDY, library, "exported", prompts, f"{library}.json", folder=folder)
        made[library] = json.loads((folder / f"{library}.json").read_text())
    assert made["vllm"] == made["transformers"]
