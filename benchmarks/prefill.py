"""Prompts of any length in vLLM on the CPU: the cost of computing them in parts, and the gain of its settings.

Each line is a fresh process of one thread with a random Qwen2. `cures` compares the two ways in which seeds for each
response work on the CPU: every prompt at once (no chunked prefill, so that a step takes the whole context), or parts of
them and random numbers that are taken back (docs/design/0019). `budgets` and `blocks` vary `max_num_batched_tokens` and
`block_size`. `other_tokens` counts responses that differ from those of the first line with the same prompts, and `gap`
is the largest difference of the others' logprobs.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from small_run import on_ranks
from transformers import AutoModelForCausalLM

from rlflow.models.tiny import write_tiny_model
from rlflow.rollout import RankInfo, Sampling, VLLMEngine

MIB = 2**20


def main() -> None:
    """Run all comparisons, print a line for each process, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--only", choices=["cures", "budgets", "blocks"], help="one comparison instead of all")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, cases in (("cures", cures()), ("budgets", budgets()), ("blocks", blocks())):
        if given.only in (None, name):
            found[name] = compared(given.hidden, given.layers, cases, name)
    print(json.dumps({"benchmark": "prefill", "hidden": given.hidden, "layers": given.layers, **found}))


def cures() -> list[dict[str, Any]]:
    """Cases at three contexts: prompts that fit many times, and one prompt that fills the context."""
    return [
        {"context": context, "whole": whole, "budget": context if whole else None, "block": None}
        | {"prompts": [context // 8] * 16 + [context - 64], "samples": 1, "max_tokens": 16}
        for context in (2048, 8192, 32768)
        for whole in (True, False)
    ]


def budgets() -> list[dict[str, Any]]:
    """64 prompts of 400 tokens, 4 responses of 64 to each."""
    return [
        {"context": 2048, "whole": False, "budget": budget, "block": None}
        | {"prompts": [400] * 64, "samples": 4, "max_tokens": 64}
        for budget in (32768, 512, 1024, 2048, 4096, 8192, 16384)
    ]


def blocks() -> list[dict[str, Any]]:
    """32 prompts of about 100 tokens, 8 responses of 64 to each."""
    return [
        {"context": 2048, "whole": False, "budget": None, "block": block}
        | {"prompts": [84 + number for number in range(32)], "samples": 8, "max_tokens": 64}
        for block in (128, 32, 64, 256)
    ]


def compared(hidden: int, layers: int, cases: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Measurements of each case in a process of its own, and how far its responses are from the first's; printed."""
    found, firsts = [], {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_model(
                Path(folder) / "model",
                hidden_size=hidden,
                intermediate_size=3 * hidden,
                layers=layers,
                max_position=case["context"],
            )
            (result,) = on_ranks(1, run, model, case)
        completions = result.pop("completions")
        first = firsts.setdefault(str(case["prompts"]), completions)
        pairs = list(zip(completions, first, strict=True))
        same = [(one.logprobs, other.logprobs) for one, other in pairs if one.token_ids == other.token_ids]
        gap = max(abs(a - b) for one, other in same for a, b in zip(one, other, strict=True))
        settings = {key: case[key] for key in ("context", "whole", "budget", "block")}
        found.append(settings | result | {"other_tokens": len(pairs) - len(same), "gap": gap})
        print(f"{name}: {json.dumps(found[-1])}", flush=True)
    return found


def run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and generate three times with a cold prefix cache, the first time to warm up."""
    import vllm

    if case["whole"]:
        vllm.LLM = functools.partial(vllm.LLM, enable_chunked_prefill=False)  # what rlflow has no setting for
    engine = VLLMEngine(kv_cache_gib=1.0, max_num_batched_tokens=case["budget"], block_size=case["block"])
    before, start = resident("VmRSS"), time.perf_counter()
    engine.setup(str(folder), RankInfo(torch.float32, torch.device("cpu")))
    start_s, started = time.perf_counter() - start, resident("VmRSS")
    prompts = [prompt for prompt in made(case["prompts"]) for _ in range(case["samples"])]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seconds = []
    for version in range(3):
        engine.update_weights([list(model.named_parameters())], version)  # empties the prefix cache
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        start = time.perf_counter()
        completions = engine.generate(prompts, range(len(prompts)), Sampling(case["max_tokens"]), version)
        seconds.append(time.perf_counter() - start)
    return {
        "start_s": round(start_s, 2),
        "start_added_mib": round((started - before) / MIB),
        "generate_s": [round(each, 2) for each in seconds],
        "peak_mib": round(resident("VmHWM") / MIB),
        "completions": completions,
    }


def made(lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(32, 127, (length,), generator=generator).tolist() for length in lengths]


def resident(kind: str) -> int:
    """Bytes of this process in memory: `VmRSS` now, `VmHWM` at the peak."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, kind
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
