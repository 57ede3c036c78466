"""The trainings, and the gates that each of them must pass."""

from __future__ import annotations

from benchmarks.learning.faults import FAULTS
from benchmarks.learning.gates import Gate, clip_fraction, divergence, explained_variance, gain
from benchmarks.learning.runs import Start, Task

LEAST_GAIN = 0.2
LEAST_GAIN_OF_PPO = 0.45  # it makes more updates; with the values of other samples it gained 0.16 and 0.37
FORESEEN = 0.5  # of the outcome's variance, by a critic with lambda 1
KL_RANGE = 0.01, 0.2  # nats per token; within one step it grows to less

START = Start("learn/sft", "configs/learn/sft.yaml")


def chains(config: str, *start: str) -> Task:
    """A training on chains by a config, from the model that was taught them."""
    return Task(f"learn/{config}", f"configs/learn/{config}.yaml", start or Task.start, needs=(START,))


LEARNS = (gain(LEAST_GAIN), clip_fraction())
PPO_LEARNS = (gain(LEAST_GAIN_OF_PPO), clip_fraction())
RESTRAINED = (divergence(*KL_RANGE),)
FORESEES = (explained_variance(FORESEEN),)

GATES: dict[Task, tuple[Gate, ...]] = {
    chains("grpo"): LEARNS,
    chains("grpo_kl"): LEARNS + RESTRAINED,
    chains("rloo_kl"): LEARNS + RESTRAINED,
    chains("reinforce_plus_plus_kl"): LEARNS + RESTRAINED,
    chains("dapo"): LEARNS,
    chains("ppo"): PPO_LEARNS + FORESEES,
    chains("ppo_kl"): PPO_LEARNS + FORESEES + RESTRAINED,
    chains("cpgd"): LEARNS,
}

OURS = chains("grpo_kl")
THEIRS = Task("learn/grpo_kl_trl", OURS.config, ("-m", "benchmarks.learning.in_trl"), (START,))
BESIDE = ("val/accuracy", "reward/mean", "actor/entropy", "actor/kl", "actor/clip_fraction")
MOST_APART = 0.05  # of `val/accuracy` after the last update


def faulty(fault: str, config: str) -> Task:
    """The first seed of a training with a fault planted in it."""
    start = ("-m", "benchmarks.learning.faults", fault, "fit")
    return Task(f"learn/{config}_{fault.replace('-', '_')}", f"configs/learn/{config}.yaml", start, (START,), (0,))


# What each gate has to notice.
FAULTY: dict[Task, tuple[Gate, ...]] = {
    faulty(name, fault.lesson): GATES[chains(fault.lesson)]
    for name, fault in FAULTS.items()
    if fault.lesson is not None
}
