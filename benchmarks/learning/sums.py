"""Does every algorithm learn by its own config? Sums of three digits, and the gates of each config."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.learning.gates import ACCURACY, Run
from benchmarks.learning.runs import Start, Task, curve, tenths
from benchmarks.learning.table import NOT_TRAINED, before_and_after, each, runs_of, standard_error


@dataclass(frozen=True)
class Claim:
    """The gates that a config's runs must pass.

    Attributes:
        config: The name of its file.
        validated: The validation metric that must rise.
        trained: A metric of training that must also move, from the mean of its first tenth to that of its last.
        falls: Whether it must fall.
        beside: A config whose mean of it over all steps must be smaller, instead of the move.
    """

    config: str
    validated: str = ACCURACY
    trained: str | None = None
    falls: bool = False
    beside: str | None = None

    @property
    def task(self) -> Task:
        """The training of the claim."""
        return Task(f"learning/{self.config}", f"configs/{self.config}.yaml", needs=STARTS.get(self.config, SFT))

    @property
    def runs(self) -> list[Run]:
        """The records of each seed."""
        return runs_of(self.task)


# `make quickstart` leaves them, where the other configs look for them.
SFT = (Start("quickstart/sft", "configs/quickstart_sft.yaml"),)
GRPO = (Start("quickstart/grpo", "configs/quickstart_grpo.yaml", needs=SFT),)
STARTS: dict[str, tuple[Task, ...]] = {
    "quickstart_sft": (),
    "gail": (),
    "on_policy_distillation": GRPO,
    "hinted_sft": (),
    "proposer_sft": (),
    "self_play": (*SFT, Start("proposer_sft", "configs/proposer_sft.yaml")),
    "self_distillation": (Start("hinted_sft", "configs/hinted_sft.yaml"),),
}

CLAIMS = (
    Claim("quickstart_sft"),
    Claim("grpo"),
    Claim("grpo_lora"),
    Claim("dr_grpo"),
    Claim("dapo", trained="actor/useful_share", beside="grpo"),
    Claim("rloo"),
    Claim("opo"),
    Claim("remax"),
    Claim("reinforce_plus_plus"),
    Claim("reinforce_plus_plus_baseline"),
    Claim("gspo"),
    Claim("cispo"),
    Claim("gmpo"),
    Claim("cpgd"),
    Claim("gpg"),
    Claim("score_centering"),
    Claim("maxrl"),
    Claim("gdpo"),
    Claim("sapo"),
    Claim("dppo"),
    Claim("off_policy_sequence_masking"),
    Claim("reinforce"),
    Claim("ppo", trained="critic/explained_variance"),
    Claim("on_policy_distillation", trained="actor/teacher_kl", falls=True),
    Claim("tree_rl"),
    Claim("raft"),
    Claim("self_play"),
    Claim("self_distillation", trained="actor/teacher_kl", falls=True),
    Claim("gail", "val/reward", trained="rollout/truncated", falls=True),
    Claim("dpo", "val/margin", trained="actor/margin"),
    Claim("simpo", "val/margin", trained="actor/margin"),
    Claim("kto", "val/margin", trained="actor/bad_reward", falls=True),
    Claim("reward_model_training"),
)


def table(claims: Iterable[Claim]) -> list[str]:
    """A line of the page for each claim."""
    lines = [
        "| config | steps | validation | before | after | gain | in standard errors | in training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for claim in claims:
        if not claim.task.complete():
            lines.append(f"| `{claim.config}` | {NOT_TRAINED} | | | | | | |")
            continue
        starts, ends = zip(*(before_and_after(run, claim.validated) for run in claim.runs), strict=True)
        gains = [after - before for before, after in zip(starts, ends, strict=True)]
        error = standard_error(gains)
        steps = int(claim.runs[0][-1]["step"])
        lines.append(
            f"| `{claim.config}` | {steps} | `{claim.validated}` | {thousandths(starts)} | {thousandths(ends)}"
            f" | {statistics.mean(gains):+.3f} ± {error:.3f} | {statistics.mean(gains) / error:.1f} | {moved(claim)} |"
        )
    return lines


def moved(claim: Claim) -> str:
    """Change of the claim's metric of training, over seeds."""
    if claim.trained is None:
        return ""
    if claim.beside is not None:
        other = replace(claim, config=claim.beside)
        mine, theirs = (statistics.mean(mean(run, claim.trained) for run in each.runs) for each in (claim, other))
        return f"`{claim.trained}` is {mine:.3f}; for `{claim.beside}` it is {theirs:.3f}"
    ends = [tenths(run, claim.trained) for run in claim.runs]
    gains = [last - first for first, last in ends]
    first, last = (statistics.mean(end) for end in zip(*ends, strict=True))
    word = "falls" if claim.falls else "rises"
    in_errors = statistics.mean(gains) / standard_error(gains) * (-1 if claim.falls else 1)
    return f"`{claim.trained}` {word} from {first:.3f} to {last:.3f}, by {in_errors:.1f} standard errors"


def learns(claim: Claim) -> bool:
    """Whether validation rose by more than two standard errors."""
    gains = [after - before for before, after in (before_and_after(run, claim.validated) for run in claim.runs)]
    return statistics.mean(gains) > 2 * standard_error(gains)


def mean(run: Run, metric: str) -> float:
    """Over a run's steps."""
    return statistics.mean(value for _, value in curve(run, metric))


def thousandths(values: Iterable[float]) -> str:
    """Seed by seed."""
    return each(values, "{:.3f}".format)
