"""Effects of silent bugs on a training: GRPO on short chains, without a bug and with each bug of `docs/museum.md`.

    python -m benchmarks.museum              # about a minute a run on one core; finished runs are not run again
    python -m benchmarks.museum --table      # run nothing: the table and the picture of what is there

The embedded model is taught chains of 16 digits with slips (`benchmarks/learning/chains.py`), and then trained for 40
steps with three seeds. All runs sample at temperature 0.7 and have a KL of 0.05: each bug has something
to spoil.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.learning.chains import Chains
from benchmarks.learning.gates import ACCURACY, Run
from benchmarks.learning.learning_curves import draw_panels
from benchmarks.learning.runs import ROOT, SEEDS, curve, records, tenths
from rlflow import PerSample, PerToken, node
from rlflow.algorithms import GRPO
from rlflow.types import Grouped, Sampled, Tokens

DIGITS, STEPS = 16, 40
RUNS, START = ROOT / "runs" / "museum", ROOT / "runs" / "museum" / "sft"
SHOWN = (ACCURACY, "actor/kl", "actor/entropy", "actor/grad_norm", "sync/logprob_gap")


class ShortChains(Chains):
    """Chains of 16 digits."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        found = super().__getitem__(row)
        return {**found, **{name: found[name][:DIGITS] for name in ("answer", "response")}}


class OneBaseline(GRPO):
    """slime #2230: one baseline is shared by all prompts."""

    @node
    def advantages(self, rollout: Grouped, rewards: PerSample) -> PerSample:
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


class KLSubtracted(GRPO):
    """verl #179: KL is subtracted from a loss that is minimised."""

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        self.trained = logprobs
        return super().surrogate(logprobs, old_logprobs, advantages, mask)

    @node(role="actor", type="train")
    def actor_loss(
        self, rollout: Sampled, advantages: PerSample, old_logprobs: PerToken, ref_logprobs: PerToken
    ) -> PerToken:
        added = super().actor_loss(rollout, advantages, old_logprobs, ref_logprobs)
        return added - 2 * self.kl.coef * self.kl.estimate(self.trained, ref_logprobs, old_logprobs)


class AdvantagesAsMask(GRPO):
    """verl #2506: advantages stand where the mask should; without the division by their sum, which is 0 in a group."""

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        return super().surrogate(logprobs, old_logprobs, advantages, mask) * advantages[:, None]


class NoTemperature(GRPO):
    """TRL #3029: the trainer's logits are not divided by the temperature of sampling."""

    @node(role="actor")
    def old_logprobs(self, rollout: Tokens) -> PerToken:
        with self.at_one():
            return super().old_logprobs(rollout)

    @node(role="actor", type="train")
    def actor_loss(
        self, rollout: Sampled, advantages: PerSample, old_logprobs: PerToken, ref_logprobs: PerToken
    ) -> PerToken:
        with self.at_one():
            return super().actor_loss(rollout, advantages, old_logprobs, ref_logprobs)

    @contextmanager
    def at_one(self) -> Iterator[None]:
        sampled, self.actor.temperature = self.actor.temperature, 1.0
        try:
            yield
        finally:
            self.actor.temperature = sampled


class MaskOneOff(GRPO):
    """mlx-lm-lora #80: the mask lies one token late, so the first token of a response is not trained on."""

    def surrogate(self, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken, mask: PerToken) -> PerToken:
        counted = torch.arange(mask.shape[1]) > 0  # of responses of one length no token behind the end is left to count
        return super().surrogate(logprobs, old_logprobs, advantages, mask) * counted


WRONG: Mapping[str, type[GRPO]] = {
    "one baseline for all prompts": OneBaseline,
    "KL subtracted": KLSubtracted,
    "advantages as mask": AdvantagesAsMask,
    "no temperature": NoTemperature,
    "mask one token off": MaskOneOff,
}


def main() -> None:
    """Run what is missing, and print the table and draw the picture of what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="run nothing")
    if not parser.parse_args().table:
        fit("sft", START, module={"max_response_length": DIGITS}, slip=0.024)
        for seed in SEEDS:
            for algorithm in (GRPO, *WRONG.values()):
                fit("grpo", folder(algorithm, seed), algorithm=algorithm, seed=seed, module=settings())
    print(f"| | {' | '.join(f'`{name}`' for name in SHOWN)} |\n|{'---|' * (len(SHOWN) + 1)}")
    for name, algorithm in {"right": GRPO, **WRONG}.items():
        print(f"| {name} | {' | '.join(', '.join(ends(run, metric) for run in runs(algorithm)) for metric in SHOWN)} |")
    panels = {name: (ACCURACY, runs(algorithm)) for name, algorithm in WRONG.items()}
    draw_panels(ROOT / "docs" / "pictures" / "museum.svg", panels, columns=5, beside=runs(GRPO))


def settings() -> dict[str, Any]:
    """Settings that all runs of GRPO have and that differ from the config's."""
    return {"max_response_length": DIGITS, "importance": None, "kl": {"coef": 0.05, "kind": "k3"}}


def fit(
    config: str, to: Path, module: dict[str, Any], algorithm: type | None = None, seed: int = 0, slip: float = 0.0
) -> None:
    """Train by a config of `configs/learn` with these changes, if that is not done."""
    if finished(to):
        return
    read = yaml.safe_load((ROOT / "configs" / "learn" / f"{config}.yaml").read_text(encoding="utf-8"))
    read["seed"] = seed
    read["module"]["init_args"] |= module
    if algorithm is not None:
        name = algorithm.__name__
        read["module"]["class_path"] = name if algorithm is GRPO else f"benchmarks.museum.{name}"
        read["module"]["init_args"]["actor"] |= {"model": str(START / "model"), "temperature": 0.7}
        read["trainer"] |= {"max_steps": STEPS, "val_check_interval": 5, "logprob_gap_limit": 10.0}
    for rows in (read["data"]["train"], read["data"]["validation"]):
        rows["class_path"] = "benchmarks.museum.ShortChains"
    if slip:
        read["data"]["train"]["init_args"]["slip"] = slip
    read["trainer"]["run_dir"] = str(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    file = to.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(read), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "rlflow.cli", "fit", "--config", str(file)], cwd=ROOT, check=True)
    to.with_suffix(".finished").touch()


def folder(algorithm: type, seed: int) -> Path:
    """Folder of a run."""
    return RUNS / algorithm.__name__ / str(seed)


def finished(run: Path) -> bool:
    """Whether a run came to its end."""
    return run.with_suffix(".finished").exists()


def runs(algorithm: type) -> list[Run]:
    """The records of the seeds that came to their end."""
    return [records(folder(algorithm, seed)) for seed in SEEDS if finished(folder(algorithm, seed))]


def ends(run: Run, metric: str) -> str:
    """The last validation, or the mean over the last tenth of the steps."""
    last = curve(run, metric)[-1][1] if metric == ACCURACY else tenths(run, metric)[1]
    return f"{last:.3g}"


if __name__ == "__main__":
    main()
