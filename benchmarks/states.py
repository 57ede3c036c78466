"""Time of an update of a model whose layers carry a state, over transformers' time for the same rows.

    python -m benchmarks.states [qwen3_5 falcon_h1 granitemoehybrid lfm2] [--dtype bfloat16] [--repeats 3]

One rank of one thread, random weights and rows: 8 prompts of 160 tokens, 8 responses to each of 10 to 192. An
update is a forward and a backward pass over all micro-batches of at most 4,096 tokens. Transformers' own model reads
the rows right-padded, those of like length together, and its output layer scores the responses alone. Times are of the
processor, medians of the repeats after one to warm up, the two ways in turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.prefixes import VOCABULARY, Case
from benchmarks.step.forward_backward import OwnForward
from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.packing import pad, padded_micro_batches, take, token_counts

ROWS = Case(prompts=8, prompt=160, samples=8, response=(10, 192)).rows()
LAYERS = 4
BUDGET = 4096
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
DELTA_RULE = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_d_ssm": 512, "mamba_n_groups": 1}
GRANITE = {name: value for name, value in MAMBA2.items() if name != "mamba_d_ssm"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA_RULE),
    "falcon_h1": ("FalconH1Config", MAMBA2),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE,
            "shared_intermediate_size": 768,
            "num_local_experts": 0,
            "layer_types": ["mamba"] * 3 + ["attention"],
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv"] * 3 + ["full_attention"]}),
}


def main() -> None:
    """Measure each family, print a line for it, and one of JSON for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar=" ".join(FAMILIES), help="which; all where none is named")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if unknown := set(given.families) - FAMILIES.keys():
        parser.error(f"there is no family {min(unknown)}; there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.families or FAMILIES:
            found[name] = measure(Path(scratch) / name, name, getattr(torch, given.dtype), given.repeats)
            print(name, found[name], flush=True)
    print(json.dumps({"benchmark": "states", "dtype": given.dtype, "families": found}))


def measure(folder: Path, name: str, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Both ways in turn: the median of the seconds of each, and of their ratios the least and the most."""
    write(folder, name)
    ways = (ours(folder, dtype), theirs(folder, dtype))
    seconds = [[timed(update) for update in ways] for _ in range(repeats + 1)][1:]
    here, there = (median(each) for each in zip(*seconds, strict=True))
    ratios = [own / other for own, other in seconds]
    return {"rlflow": here, "transformers": there, "ratio": here / there, "least": min(ratios), "most": max(ratios)}


def timed(update: Callable[[], None]) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    update()
    return time.process_time() - start


def write(folder: Path, name: str) -> None:
    """Write the family's model with random weights."""
    kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | settings, num_hidden_layers=LAYERS)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def ours(folder: Path, dtype: torch.dtype) -> Callable[[], None]:
    """An update by rlflow."""
    handle = CausalLM(str(folder))
    handle.attach(handle.load(folder, dtype, torch.device("cpu")), ForwardPlan(BUDGET))

    def update() -> None:
        for part in handle.plan.micro_batches(ROWS):
            with handle.training():
                handle.logprobs(take(ROWS, part)).sum().backward()

    return update


def theirs(folder: Path, dtype: torch.dtype) -> Callable[[], None]:
    """An update by transformers' own forward pass."""
    own: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    forward = OwnForward(own, own.model, own.lm_head)

    def update() -> None:
        for part in padded_micro_batches(token_counts(ROWS), BUDGET):
            read = pad(take(ROWS, part))
            forward(read.input_ids, None, read.scored, read.targets).sum().backward()

    return update


if __name__ == "__main__":
    main()
