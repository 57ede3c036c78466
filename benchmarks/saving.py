"""Time that a step waits for a checkpoint and a model, written by the step or in the background.

    python benchmarks/saving.py

GRPO on two gloo ranks, ZeRO-2, ZeRO-3 and FSDP2, AdamW, a model of 26 million float32 weights: 105 MB of model and 315
MB of state at each save. **Generation is emulated by sleeps**, so that writing ends before the next save. Seconds are
those of the slower rank: that the step waits; of these on a core, which is what it waits where it has one for itself;
and from the beginning of a save until both ranks have written all of it to the disk (fsync included). The first save
also makes the memory for the copies. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from small_run import OddCharacters, ScriptedEngine, on_ranks, prompts, train

import rlflow.run.fit
from rlflow import CausalLM, Optimizer
from rlflow.algorithms import GRPO
from rlflow.models.tiny import write_tiny_model
from rlflow.run.saving import Saving
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy

STRATEGIES = {"ZeRO-2": partial(DeepSpeedStrategy, 2), "ZeRO-3": partial(DeepSpeedStrategy, 3), "FSDP2": FSDPStrategy}
EVERY = 3  # steps between saves
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "layers": 8}


def main() -> None:
    """Run each stage both ways and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5, help="of a run")
    parser.add_argument("--generate-seconds", type=float, default=4.0, help="of a step")
    parser.add_argument("--strategy", choices=STRATEGIES, help="only this one")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one otherwise")
    given = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write_tiny_model(Path(folder) / "model", **SHAPE)
        for name in STRATEGIES if given.strategy is None else (given.strategy,):
            for async_save in (False, True):
                ranks = on_ranks(2, saves, Path(folder), name, async_save, given.saves, given.generate_seconds)
                slower = {key: [max(both) for both in zip(*(of[key] for of in ranks), strict=True)] for key in ranks[0]}
                first, later = ({key: each[place] for key, each in slower.items()} for place in (0, slice(1, None)))
                row: dict[str, Any] = {"strategy": name, "async_save": async_save}
                row |= {key: round(statistics.median(each), 3) for key, each in later.items()}
                row |= {f"first_{key}": round(each, 3) for key, each in first.items()}
                table.append(row)
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    for waits, goes_on in zip(table[::2], table[1::2], strict=True):
        share = goes_on["waits"] / goes_on["written"]
        print(f"{waits['strategy']}: a step waits {share:.1%} of the writing time")
    print(json.dumps({"benchmark": "saving", "table": table}))


class TimedSaving(Saving):
    """Notes what its saves take."""

    seconds: dict[str, list[float]]

    def save(self, *arguments: Any) -> None:
        """See `Saving.save`."""
        began, computed = time.perf_counter(), time.thread_time()
        super().save(*arguments)
        self.seconds["waits"].append(time.perf_counter() - began)
        self.seconds["computes"].append(time.thread_time() - computed)
        self._disk.report(lambda error: self.seconds["written"].append(time.perf_counter() - began))


def saves(folder: Path, name: str, async_save: bool, count: int, generate_s: float) -> dict[str, list[float]]:
    """For each save of a run on this rank: how long the step waits, its time on a core, and when all was written."""
    seconds: dict[str, list[float]] = {"waits": [], "computes": [], "written": []}
    rlflow.run.fit.Saving = type("OfThisRun", (TimedSaving,), {"seconds": seconds})  # type: ignore[misc]
    module = GRPO(CausalLM(str(folder / "model"), optimizer=Optimizer("adamw", lr=1e-4)), OddCharacters(), group_size=2)
    module.max_response_length = 8
    run_dir = folder / f"{name}-{async_save}"
    train(
        module,
        prompts(folder, 64, 4),
        EVERY * count - 1,
        engine=ScriptedEngine(mean=6, sigma=0.3, seconds=generate_s),
        strategy=STRATEGIES[name](),
        run_dir=str(run_dir),
        save_every_n_steps=EVERY,
        async_save=async_save,
        logprob_gap_limit=1e9,
    )
    return seconds


if __name__ == "__main__":
    main()
