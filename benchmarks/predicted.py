r"""`rlflow simulate` against measured steps on the machine at hand.

    python benchmarks/calibrate.py --to machine.yaml --set module.anchor=old module.actor=runs/quickstart/sft/model
    python benchmarks/predicted.py --hardware machine.yaml \
        --set module.anchor=old module.actor=runs/quickstart/sft/model

Runs the config for a few steps with each number of ranks, and prints what a step took (the median of those after the
first), what was predicted, and the error, in all and by node. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from calibrate import STEPS, median, run

from rlflow.commands.simulate import read_simulate
from rlflow.simulate.designs import node_seconds, works
from rlflow.simulate.hardware import Hardware, read_hardware
from rlflow.simulate.simulation import PredictedStep


def main() -> None:
    """Predict, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart_grpo.yaml")
    parser.add_argument("--hardware", type=Path, required=True, help="what calibrate.py wrote")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options of the config")
    given = parser.parse_args()
    machine = read_hardware(str(given.hardware))
    lengths = dict(re.findall(r"^# (\w+_tokens): ([\d.]+)$", given.hardware.read_text(), re.MULTILINE))
    options = [f"--{option}" for option in given.set]
    tokens = [f"--{name}={value}" for name, value in lengths.items()]
    table = {}
    for ranks in given.ranks:
        expected = predict(given.config, [*options, f"--trainer.devices={ranks}", *tokens], machine, ranks)
        with tempfile.TemporaryDirectory() as folder:
            lines = run(given.config, options, ranks, Path(folder) / "run", given.steps)
        parts = node_seconds(works(expected.workload, machine.computing_on(ranks), "rlflow"))
        for name, seconds in parts.items():
            if f"time/{name}" in lines[-1]:
                print(f"  {ranks} ranks, {name:<14} {_compared(seconds, median(lines, f'time/{name}'))}", flush=True)
        predicted, measured = expected.timelines["rlflow"].seconds, median(lines, "time/step")
        print(f"{ranks} ranks, a step: {_compared(predicted, measured)}", flush=True)
        table[ranks] = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
    print(json.dumps(table))


def predict(config: str, options: list[str], machine: Hardware, ranks: int) -> PredictedStep:
    """A step with all ranks on this machine."""
    simulation = read_simulate(["--config", config, *options, "--scaling=strong"])
    return replace(simulation, hardware=replace(machine, gpus_per_node=ranks)).predicted


def _compared(predicted: float, measured: float) -> str:
    return f"predicted {predicted:7.3f} s, measured {measured:7.3f} s, {predicted / measured - 1:+.0%}"


if __name__ == "__main__":
    main()
