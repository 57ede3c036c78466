"""Division of the processor's time while vLLM decodes on the CPU: rlflow, vLLM's parts, the model.

    python -m benchmarks.decoding [--workload W2] [--tokens 200] [--set enforce_eager=false]

One process of one thread generates as many tokens for each row of a workload's step as asked for; rows do not end
before. Every millisecond of processor time a signal looks where the thread is. A second profile has the time that
passes in operators: in torch's own, and in those that vLLM adds to torch. Both give shares of their own run, and shares
times the processor time of a step without a profile are milliseconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.step.workloads import WORKLOADS, Workload
from rlflow.rollout import RankInfo, Sampling, VLLMEngine
from rlflow.rollout.engine import RolloutEngine

EVERY_S = 0.001
# Parts of vLLM by what a path holds; a stack belongs to the first that one of its frames, from the outermost on, names.
PARTS = {
    "model": ("vllm/model_executor/models/",),
    "sampling": ("vllm/v1/sample/", "vllm/v1/worker/cpu_model_runner.py:sample", "_sample"),
    "scheduling": ("vllm/v1/core/",),
    "outputs": ("vllm/v1/engine/output_processor.py", "vllm/v1/engine/logprobs.py"),
    "inputs and the rest of the worker": ("vllm/v1/worker/",),
    "the rest of vLLM": ("vllm/",),
}


def part_of(frame: FrameType | None) -> str:
    """The part to which the time of a stack belongs: a part of vLLM if the stack is in vLLM, else rlflow."""
    places = []
    while frame is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    inner = next((place for place in places if "/torch/" not in place), "")
    if "/rlflow/" in inner:
        return "rlflow"
    for part, names in PARTS.items():
        if any(name in place for place in places if "vllm/" in place for name in names):
            return part
    return "rlflow"


class Profile:
    """Counts in whose part the thread is, each time that a millisecond of the processor's has passed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Profile:
        signal.signal(signal.SIGPROF, lambda _, frame: self.counts.update([part_of(frame)]))
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


def in_operators(generate: Callable[[], object]) -> Counter[str]:
    """The shares of the time of `generate` that pass in operators, of torch and of vLLM."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        generate()
        seconds = time.perf_counter() - start
    shares: Counter[str] = Counter()
    for event in profile.key_averages():
        library = "torch's operators" if event.key.startswith("aten::") else "vLLM's operators"
        shares[library] += event.self_cpu_time_total / 1e6 / seconds
    return shares


def prompts_of(workload: Workload, folder: Path) -> list[list[int]]:
    """A prompt for each row of a step; a token is a character."""
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    return [list(text.encode()) for text in texts for _ in range(workload.group)]


def main() -> None:
    """Generate once to warm up, once by the clock, and once with each profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="W2")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    workload = WORKLOADS[given.workload]
    settings = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in given.set)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workload.write(folder, 1)
        engine: RolloutEngine = VLLMEngine(**settings)
        engine.setup(str(folder / "model"), RankInfo(workload.dtype, torch.device("cpu")))
        weights = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=workload.dtype).named_parameters()
        engine.update_weights(iter([[(name, weight.detach()) for name, weight in weights]]), 1)
        prompts = prompts_of(workload, folder)
        arguments = prompts, list(range(len(prompts))), Sampling(given.tokens, stop_token_ids=()), 1
        engine.generate(*arguments)
        start = time.process_time()
        engine.generate(*arguments)
        step = 1000 * (time.process_time() - start) / given.tokens
        with Profile() as profile:
            engine.generate(*arguments)
        operators = in_operators(lambda: engine.generate(*arguments))
    total = profile.counts.total()
    parts = {part: round(step * count / total, 3) for part, count in profile.counts.most_common()}
    operators["Python and the rest"] = 1 - operators.total()
    of_operators = {part: round(step * share, 3) for part, share in operators.most_common()}
    found = {"workload": given.workload, "rows": len(prompts), "ms_of_a_step": round(step, 2)}
    print(json.dumps(found | {"ms_by_part": parts, "ms_by_operator": of_operators}))


if __name__ == "__main__":
    main()
