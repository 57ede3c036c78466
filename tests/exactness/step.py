"""Run by the ranks of the exactness tests: one whole step of an algorithm, from config objects to updated weights.

The rollout engine answers with recorded responses, so that every run trains on the same tokens; all else is real.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

import rlflow.algorithms
from rlflow import Batch, PerToken, RewardModel, RLModule, Rollout, node
from rlflow.algorithms import RewardModelTraining
from rlflow.callbacks.hooks import Callbacks
from rlflow.data.prompts import PromptData
from rlflow.data.sources import JSONL
from rlflow.models import prefixes
from rlflow.rewards import SampleReward
from rlflow.rollout.assignment import EngineSettings
from rlflow.run.fit import fit
from rlflow.run.prepare import prepare
from rlflow.strategies import SingleProcess, TrainingStrategy
from rlflow.trainer import Trainer
from rlflow.types import Ragged
from tests.algorithm_factory import made
from tests.exactness.cases import Case, settings
from tests.exactness.step_record import Answer, Recorded, Recording
from tests.exactness.step_settings import Setting
from tests.strategies.strategy_update import strategy_of


@dataclass(frozen=True)
class Outcome:
    """The result of a role, by Hugging Face name.

    Attributes:
        adapters: Adapters as they were before the first update; none where all weights are trained.
        gradients: Gradients of the trained weights in each update.
        weights: Weights after the last update, adapters merged.
    """

    adapters: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]

    @property
    def gradient(self) -> dict[str, Tensor]:
        """Gradient of the one update that the role made."""
        (gradient,) = self.gradients
        return gradient


class CountsOnes(SampleReward):
    """A reward of as many points as the response has the digit 1."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(text.count("1"))


class CountsParts(SampleReward):
    """The number of ones, and a point for several."""

    def score_sample(self, text: str, row: dict[str, Any]) -> dict[str, float]:
        return {"ones": float(text.count("1")), "several": float(text.count("1") > 1)}


class RecordedPast:
    """Another policy sampled, so that the ratio is not 1 and clips have something to do."""

    recording: Recording
    needs_old_logprobs = True

    def old_logprobs(self, rollout: Rollout) -> PerToken:
        return per_token(rollout, [answer.old_logprobs for answer in answers(self.recording, rollout)])


class RecordedTurns:
    """The responses are conversations: of some of their tokens an environment is the author.

    Attributes:
        noise: The engine's logprobs of those tokens.
    """

    recording: Recording
    noise: float
    at_end: bool

    def paid(self, answer: Answer) -> list[float]:
        given = answer.turn_rewards
        return [*[0.0] * (len(given) - 1), sum(given)] if self.at_end else given

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        sampled: Rollout = self.generate(batch, self.group_size)
        found = answers(self.recording, sampled)
        spoken = per_token(sampled, [tuple(map(float, each.spoken)) for each in found]) > 0
        return replace(
            sampled,
            loss_mask=sampled.loss_mask & spoken,
            logprobs=sampled.logprobs.where(spoken, self.noise),
            segments=Ragged.from_lists([each.segments for each in found]),
            turn_rewards=Ragged(
                torch.tensor([reward for each in found for reward in self.paid(each)], dtype=sampled.logprobs.dtype),
                torch.tensor([len(each.turn_rewards) for each in found]),
            ),
        )


class RecordedValues(RecordedPast):
    """Another critic valued the tokens."""

    def values(self, rollout: Rollout) -> PerToken:
        return per_token(rollout, [answer.old_values for answer in answers(self.recording, rollout)])


def answers(recording: Recording, rollout: Rollout) -> list[Answer]:
    """The recorded response of each row."""
    rows = zip(rollout.prompt_ids.rows(), rollout.response_ids, rollout.lengths, strict=True)
    return [recording.find(prompt.tolist(), ids[:length].tolist()) for prompt, ids, length in rows]


def per_token(rollout: Rollout, rows: list[tuple[float, ...]]) -> Tensor:
    """The numbers of each row, padded as the rollout is."""
    padded = torch.zeros_like(rollout.logprobs)
    for row, numbers in zip(padded, rows, strict=True):
        row[: len(numbers)] = torch.tensor(numbers, dtype=padded.dtype)
    return padded


def one_step(recording: Recording, case: Case, setting: Setting, scratch: Path) -> dict[str, Outcome]:
    """Run one step; what this rank then knows of each trained role, the same on every rank."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = _strategy(setting)
    if setting.checkpointing:
        case = replace(case, more={**case.more, "gradient_checkpointing": True})
    module = _module(recording, case)
    data = PromptData(
        JSONL(str(recording.data / f"{case.data}.jsonl")),
        prompts_per_step=len(case.prompts),
        **case.columns,
    )
    trainer = Trainer(
        run_dir=str(scratch / "run"),
        fast_dev_run=True,
        devices=world_size,
        accelerator="cpu",
        balance=setting.balance,
        logprob_gap_limit=100.0,  # the recorded logprobs are not the model's
        seed=setting.seed,
    )
    one = replace(trainer.settings, max_steps=1)
    engine = Recorded(recording)
    prepared = prepare(module, data, one, strategy, EngineSettings(engine), scratch)
    for most in prepared.support_bounds.values():
        engine.return_support(most)
    Fabric(accelerator="cpu", devices=world_size, strategy=strategy.processes).launch()
    adapters: dict[str, dict[str, Tensor]] = {}
    gradients: dict[str, list[dict[str, Tensor]]] = {}
    update = strategy.step

    def step(name: str, most: float) -> float:
        before = gradients.setdefault(name, [])
        before.append({key: value.clone() for key, value in strategy.gradients(name).items()})
        if "lora" in case.more and name not in adapters:
            adapters[name] = trained_weights(strategy, name)
        return update(name, most)

    strategy.step = step  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefixes, "SHORTEST", 1)  # prompts have a few tokens here
        fit(prepared, Callbacks([], trainer, module), (), trainer, None)
    return {
        role: Outcome(
            adapters.get(role, {}),
            of_updates,
            {key: value.clone() for bucket in strategy.weights(role, 2**20) for key, value in bucket},
        )
        for role, of_updates in gradients.items()
    }


def trained_weights(strategy: TrainingStrategy, name: str) -> dict[str, Tensor]:
    """The weights that the role's optimizer changes, in full."""
    trained = strategy.roles[name].model.trained()
    return {key: weight.clone() for bucket in strategy._full(trained, 2**20) for key, weight in bucket}


def _module(recording: Recording, case: Case) -> RLModule:
    algorithm = getattr(rlflow.algorithms, case.algorithm)
    if case.past and case.objective is not None and case.objective.anchor == "old":
        mixin = RecordedValues if "critic" in case.models else RecordedPast
        algorithm = type(f"{mixin.__name__}{case.algorithm}", (mixin, algorithm), {"recording": recording})
    if case.turns:
        given = {"recording": recording, "noise": case.noise, "at_end": case.paid == "end"}
        algorithm = type(f"Turns{algorithm.__name__}", (RecordedTurns, algorithm), given)
    counts = CountsParts() if case.objective is not None and case.objective.advantages == "gdpo" else CountsOnes()
    reward = {"reward": counts} if case.objective is not None else {}
    folder, given = str(getattr(recording, case.model)), settings(case, recording)
    module: RLModule
    if algorithm is RewardModelTraining:
        module = RewardModelTraining(RewardModel(folder, **given))
    else:
        module = made(algorithm, folder, **reward, **given)
    return module


def _strategy(setting: Setting) -> TrainingStrategy:
    if setting.stage is None:
        return SingleProcess(setting.precision, setting.token_budget, setting.packing, setting.share_prefixes)
    more = {"packing": setting.packing, "share_prefixes": setting.share_prefixes}
    return strategy_of(setting.stage, setting.precision, setting.token_budget, **more)
