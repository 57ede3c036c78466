"""A newcomer's first hour: an algorithm, a reward and data of their own, a tool, a report, a score, an export."""

from __future__ import annotations

import json
import os
import re
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
def graded(response, answer):
    """1 for the answer, else half of the share of digits."""
    said = response.strip()
    return 1.0 if said == answer else 0.5 * sum(letter.isdigit() for letter in said) / max(1, len(said))


def constant(response):
    """A little for every response; an environment adds its own."""
    return 0.1
'''
MINE = """
module:
  init_args:
    reward: my_rewards.graded
data:
  train: {class_path: mixture, init_args: {datasets: {plus: plus.jsonl, minus: {data: minus.jsonl, weight: 2}}}}
  validation: held_out.jsonl
trainer: {run_dir: runs/mine}
"""
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


def blocks(document: str, section: str) -> list[str]:
    """The code of a document's section, in order."""
    text = (ROOT / document).read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)


def ran(*command: str, folder: Path) -> str:
    """What a command prints, which ends well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, in which the newcomer has written files and trained."""
    folder = tmp_path_factory.mktemp("newcomer")
    algorithm, config, _ = blocks("README.md", "Write your own algorithm")
    files = {"my_algorithm.py": algorithm, "my.yaml": config, "my_rewards.py": REWARD, "mine.yaml": MINE}
    for name, sign in ("plus", 1), ("minus", -1):
        rows = [
            {"prompt": f"{a}{'+' if sign > 0 else '-'}{b}=", "answer": str(a + sign * b)}
            for a in range(9) for b in range(a)
        ]  # fmt: skip
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        files["held_out.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows[:12])
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    ran(*RLFLOW, "fit", "--config", "my.yaml", "--config", "mine.yaml", folder=folder)
    return folder


def test_the_reward_of_two_datasets_rises(folder: Path) -> None:
    steps = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward/mean" in step]
    assert len(steps) == 40
    for name in "reward/mean", "reward/plus/mean", "reward/minus/mean":
        first, last = ([step[name] for step in part if name in step] for part in (steps[:10], steps[-10:]))
        error = (statistics.variance(first) / len(first) + statistics.variance(last) / len(last)) ** 0.5
        assert statistics.mean(last) - statistics.mean(first) > 2 * error, name
    assert all("reward/price" in step for step in steps)  # which the algorithm logs


def test_a_tool_takes_part_in_a_step(folder: Path) -> None:
    world, rows, config, *_ = blocks("docs/first_environment.md", "A folder that works")
    for name, text in {"my_env.py": world, "words.jsonl": rows, "agent.yaml": config}.items():
        (folder / name).write_text(text, encoding="utf-8")
    ours = "--module", "my_algorithm.ShortGRPO", "--module.reward", "my_rewards.constant", "--trainer.max_steps", "1"
    ran(*RLFLOW, "fit", "--config", "agent.yaml", *ours, folder=folder)
    (step, *_) = (folder / "runs/agent/metrics.jsonl").read_text().splitlines()
    assert "rollout/tool_calls" in json.loads(step)


def test_a_browser_opens_the_report(folder: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: install Debian's package `chromium`")
    ran(*RLFLOW, "report", "runs/mine", "--html", folder=folder)
    page = (folder / "runs/mine/report.html").as_uri()
    options = "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"
    shown = subprocess.run(
        [browser, *options, f"--user-data-dir={folder / 'profile'}", page], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert "reward/minus/mean" in shown.stdout


def test_the_model_is_scored_exported_and_the_same_in_transformers_and_vllm(folder: Path) -> None:
    asked = "--config", "my.yaml", "--config", "mine.yaml", "--module.actor", "runs/mine", "--trainer.val_samples", "2"
    assert "pass@2" in ran(*RLFLOW, "test", *asked, folder=folder)
    ran(*RLFLOW, "export", "--model", "runs/mine", "--to", "exported", folder=folder)
    assert (folder / "exported" / "README.md").is_file()
    prompts, made = json.dumps([[1, 5, 9, 12], [7, 3], [20, 21, 22, 23, 24, 25, 26]]), {}
    for library in "transformers", "vllm":
        ran(sys.executable, "-c", GREEDY, library, "exported", prompts, f"{library}.json", folder=folder)
        made[library] = json.loads((folder / f"{library}.json").read_text())
    assert made["vllm"] == made["transformers"]
