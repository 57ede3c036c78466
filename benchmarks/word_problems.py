"""A run on word problems like GSM8K's: real prompts, the chat template, vLLM on two ranks of a CPU.

    python benchmarks/word_problems.py write
    rlflow fit --config configs/grpo_word_problems.yaml
    python benchmarks/word_problems.py check

`write` makes a JSONL of 200 problems from reasoning-gym's generator `gsm_symbolic`, with prompts of 100 to 400 tokens:
the embedded model has one for each character. Its weights are random, so no answer can be rewarded yet; the config
rewards long responses instead, which a policy gradient learns in a few steps. `check` reads the run's metrics: whether
each is finite, how far vLLM's logprobs were from training's, and how the reward rose. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

FOLDER = Path("runs/word_problems")
PROBLEMS = 200
SHORTEST, LONGEST = 100, 400  # tokens of a prompt, the template's included
TEMPLATE = 19  # tokens that the embedded model's template puts around a question, at most
INSTRUCTION = " Give the result as your final answer. Do not include units."
LONGEST_RESPONSE = 64
GAP_LIMIT = 1e-5  # mean difference of vLLM's and training's logprobs in float32
RISE = 0.1  # of the reward, at least


def main() -> None:
    """Write the problems, or check the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the problems and the run")
    given = parser.parse_args()
    if given.what == "write":
        write(given.folder / "problems.jsonl")
    else:
        found = check(given.folder / "grpo" / "metrics.jsonl")
        print(json.dumps({"benchmark": "word_problems", **found}))


def write(path: Path, seed: int = 0) -> None:
    """Write the problems, each once: `question`, `answer`."""
    import reasoning_gym

    generator = reasoning_gym.create_dataset("gsm_symbolic", size=4 * PROBLEMS, seed=seed)
    problems: dict[str, str] = {}
    for entry in generator:
        question = entry["question"].removesuffix(INSTRUCTION)
        if SHORTEST <= len(question) + TEMPLATE <= LONGEST and len(problems) < PROBLEMS:
            problems.setdefault(question, entry["answer"])
    assert len(problems) == PROBLEMS, len(problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"question": question, "answer": answer}) for question, answer in problems.items()]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def length(response: str, row: dict[str, Any]) -> float:
    """The reward: the characters of a response, as a share of the longest there may be."""
    return len(response) / LONGEST_RESPONSE


def check(metrics: Path) -> dict[str, float]:
    """Check a run's `metrics.jsonl`.

    Raises:
        AssertionError: A metric is not finite, the engine was too far from training, or the reward did not rise.
    """
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [step for step in steps if "reward/mean" in step]
    for step in steps:
        unfinished = {name: value for name, value in step.items() if not math.isfinite(value)}
        assert not unfinished, unfinished
    gap = max(step["sync/logprob_gap"] for step in steps)
    rewards = [step["reward/mean"] for step in steps]
    assert gap <= GAP_LIMIT, f"the mean logprob gap reached {gap:.2g}, allowed are {GAP_LIMIT}"
    assert rewards[-1] > rewards[0] + RISE, f"the reward went from {rewards[0]:.3f} to {rewards[-1]:.3f}"
    seconds = sorted(step["time/step"] for step in steps)
    return {
        "steps": len(steps),
        "largest_gap": gap,
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "seconds_per_step": seconds[len(seconds) // 2],
    }


if __name__ == "__main__":
    main()
