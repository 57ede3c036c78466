"""Long contexts on paper: rlflow against one controller that pads, beside DistFlow's figures for 8k to 64k tokens.

    python benchmarks/long_context.py

GRPO on Qwen2.5 of 7B and 32B on 32 H100s, 1,024 and 512 rows a node as in the paper's other figures, prompts of 2,048
tokens and every response as long as it may be. The paper does not say on how many GPUs; 32 is where its speedup of 7B
at 6k tokens is nearest to that at 8k.

Two numbers are fitted, neither on the figures compared here: by how much verl computes slower is what
`rlflow simulate --paper` finds in all throughput figures, and `hub_bandwidth` is such that the simulated speedups of 7B
at 6k tokens on 8 to 64 GPUs are the paper's. The last line is JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rlflow.commands.simulate import read_simulate
from rlflow.simulate.hardware import PRESETS, Hardware
from rlflow.simulate.paper import BATCH_PER_NODE, CONSTANTS, CONTEXT_SPEEDUPS, FIGURES, PARAMETERS, Model, fit
from rlflow.simulate.simulation import PredictedStep

CONFIG = Path(__file__).parents[1] / "configs" / "grpo_math_16nodes.yaml"
PROMPT, AT_6K = 2048, 4096
NODES, GROUP = 4, 16
PARALLEL: Mapping[Model, int] = {"7B": 1, "32B": 4}  # ranks of an engine
PEERS: Mapping[int, int] = {8192: 1, 16384: 1, 32768: 2, 65536: 4}  # of a sequence, so that activations fit


def main() -> None:
    """Fit, predict, compare."""
    machine = fitted()
    print(f"hub_bandwidth {machine.hub_bandwidth:.3g} bytes/s, from verl's rates of 7B at 6k tokens")
    table: dict[str, dict[int, list[float]]] = {}
    for model, figures in CONTEXT_SPEEDUPS.items():
        for tokens, paper in figures.items():
            predicted = step(model, tokens - PROMPT, NODES, machine, PEERS[tokens])
            found = speedup(model, predicted)
            short = "" if predicted.memory.fits else "; memory is short"
            print(f"{model:>4} {tokens:>6} tokens: {found:.2f}, paper {paper:.2f}, {found / paper - 1:+.0%}{short}")
            table.setdefault(model, {})[tokens] = [round(found, 2), paper]
    print(json.dumps(table))


def speedup(model: Model, predicted: PredictedStep) -> float:
    """Of rlflow over one controller that pads, and whose ranks compute slower."""
    share = dict(zip(CONSTANTS, fit(FIGURES), strict=True))["controller"] * math.sqrt(PARAMETERS[model] / 10)
    return predicted.timelines["padded"].seconds / predicted.timelines["rlflow"].seconds + share


def step(model: Model, response: int, nodes: int, machine: Hardware, peers: int = 1) -> PredictedStep:
    """A step at these lengths."""
    rows = BATCH_PER_NODE["GRPO", model] * nodes
    place = f"--placement={{actor: {{sequence_parallel_size: {peers}}}}}" if peers > 1 else "--placement=null"
    options = [
        f"--module.actor.model=Qwen/Qwen2.5-{model}",
        f"--module.group_size={GROUP}",
        f"--module.max_response_length={response}",
        f"--module.actor.samples_per_update={rows}",
        f"--data.prompts_per_step={rows // GROUP}",
        f"--data.max_prompt_length={PROMPT}",
        f"--rollout.max_model_len={PROMPT + response}",
        f"--rollout.tensor_parallel_size={PARALLEL[model]}",
        "--trainer.devices=8",
        f"--trainer.num_nodes={nodes}",
        place,
        f"--prompt_tokens={PROMPT}",
        f"--response_tokens={response}",
        f"--nodes={nodes}",
    ]
    simulation = read_simulate(["--config", str(CONFIG), *options])
    return replace(simulation, hardware=machine).predicted


def fitted() -> Hardware:
    """H100s with a controller so slow that the speedups of 7B at 6k tokens are the paper's, in their geometric mean."""
    rates = {(figure.curve, figure.gpus): figure.rate for figure in FIGURES}
    paper = [rates[("GRPO", "7B", "distflow"), gpus] / rates[("GRPO", "7B", "verl"), gpus] for gpus in (8, 16, 32, 64)]
    low, high = 1e6, 1e9
    for _ in range(12):
        middle = math.sqrt(low * high)
        machine = replace(PRESETS["h100"], hub_bandwidth=middle)
        found = [speedup("7B", step("7B", AT_6K, nodes, machine)) for nodes in (1, 2, 4, 8)]
        too_slow = sum(map(math.log, found)) > sum(map(math.log, paper))
        low, high = (middle, high) if too_slow else (low, middle)
    return machine


if __name__ == "__main__":
    main()
