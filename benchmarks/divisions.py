"""Divisions that `rlflow simulate --suggest` gives models of five sizes on 8 to 1,024 GPUs, for `docs/simulate.md`.

    python -m benchmarks.divisions

The step of `configs/grpo_235b_128gpu.yaml`, 1,024 prompts of 16 responses, with other models on any number of GPUs. An
engine has as many of these as leave room for its caches. Nothing of it was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

from rlflow.commands.simulate import read_simulate

CONFIG = Path(__file__).parents[1] / "configs" / "grpo_235b_128gpu.yaml"
ENGINES = {  # ranks of an engine, by model
    "Qwen/Qwen2.5-7B": 1,
    "Qwen/Qwen2.5-32B": 2,
    "Qwen/Qwen2.5-72B": 4,
    "Qwen/Qwen3-30B-A3B": 2,
    "Qwen/Qwen3-235B-A22B": 8,
}
NODES = (1, 8, 32, 128)
UNDIVIDED = "1 x 1 x 1"


def main() -> None:
    """Print the table."""
    for line in table():
        print(line, flush=True)


def table() -> Iterator[str]:
    """The lines of the table in Markdown."""
    yield "| Model | Machine | " + " | ".join(f"{8 * nodes:,} GPUs" for nodes in NODES) + " |"
    yield "|---" * (2 + len(NODES)) + "|"
    for model in ENGINES:
        for machine in ("h100", "h200"):
            cells = (fastest(model, machine, nodes) for nodes in NODES)
            yield f"| {model.rpartition('/')[2]} | {machine} | " + " | ".join(cells) + " |"


def fastest(model: str, machine: str, nodes: int) -> str:
    """Seconds of a step by the fastest division that fits; the division and its gain, if that is 1 % or more."""
    settings = f"--module.actor.model={model}", f"--rollout.tensor_parallel_size={ENGINES[model]}"
    on = f"--hardware={machine}", f"--nodes={nodes}", "--scaling=strong"
    found = read_simulate([f"--config={CONFIG}", *settings, *on]).divisions
    seconds = {str(division): step.timelines["rlflow"].seconds for division, step in found}
    if not seconds:
        return "does not fit"
    best, *_ = seconds
    if best == UNDIVIDED or seconds.get(UNDIVIDED, inf) < 1.01 * seconds[best]:
        return f"{seconds[UNDIVIDED]:,.0f} s"
    gain = f"{seconds[UNDIVIDED] / seconds[best]:.2f} times as fast" if UNDIVIDED in seconds else "else it does not fit"
    return f"{seconds[best]:,.0f} s ({best}: {gain})"


if __name__ == "__main__":
    main()
