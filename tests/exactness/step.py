"""What the ranks of the exactness tests run: one whole step of GRPO, from config objects to updated weights.

The rollout engine answers with recorded responses, so that every run trains on the same tokens; all else is real.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from rlflow import PerToken, Rollout
from rlflow.algorithms import GRPO
from rlflow.data.prompts import PromptData
from rlflow.data.sources import JSONL
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.preparation import prepare
from rlflow.rewards import SampleReward
from rlflow.rollout.engine import Completion, RolloutEngine, Sampling, SyncReport
from rlflow.run import Run
from rlflow.strategies import DeepSpeedStrategy, SingleProcess, TrainingStrategy
from rlflow.trainer import Trainer
from tests.reference.policy_float64 import Objective

PROMPTS, GROUP, LONGEST = 5, 3, 12  # 15 samples: no number of ranks but 1 divides them
LR = 0.05
OBJECTIVE = Objective(clip_high=0.28, kl_coef=0.3, max_response_length=LONGEST, temperature=0.8)


@dataclass(frozen=True)
class Recording:
    """The folders and recorded samples of one step; `responses[p][k]` are tokens and rollout logprobs."""

    policy: Path
    reference: Path
    data: Path
    responses: list[list[tuple[tuple[int, ...], tuple[float, ...]]]]


@dataclass(frozen=True)
class Setting:
    """What is computed (`objective`), and how it is run; by the claim under test none of the latter matters."""

    stage: int | None  # None: SingleProcess
    precision: str = "fp32"
    token_budget: int = 4096
    packing: bool = True
    balance: str = "auto"
    objective: Objective = OBJECTIVE


@dataclass(frozen=True)
class Outcome:
    """The gradient before the step, and the weights after it, by Hugging Face name."""

    gradient: dict[str, Tensor]
    weights: dict[str, Tensor]


class CountsOnes(SampleReward):
    """As many points as the response has the digit 1."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(text.count("1"))


class Recorded(RolloutEngine):
    """Answers the k-th request for a prompt with its k-th recorded response."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def setup(self, model_path: str, **rank: Any) -> None:
        self._context = 1024

    def close(self) -> None:
        """Nothing is open."""

    def update_weights(self, buckets: Iterable[list[tuple[str, Tensor]]], version: int) -> SyncReport:
        tensors = [weight for bucket in buckets for _, weight in bucket]
        self.policy_version = version
        return SyncReport(version, len(tensors), 0, 0.0)

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        asked: dict[tuple[int, ...], int] = {}
        completions = []
        for prompt in prompts:
            key = tuple(prompt)
            turn = asked[key] = asked.get(key, -1) + 1
            tokens, logprobs = self._recording.responses[len(key) - 1][turn]  # prompt p has p + 1 tokens
            completions.append(Completion(tokens, logprobs, True))
        return completions

    def _load(self, weights: Any) -> None:
        raise AssertionError("`update_weights` takes no weights")

    def _held(self) -> Any:
        raise AssertionError("`update_weights` reads none back")


class TwoModels(GRPO):
    """GRPO whose reference is another model, so that the KL term has a gradient from the first step."""

    reference_model: str

    def configure_models(self) -> None:
        super().configure_models()
        self.reference = CausalLM(self.reference_model, trainable=False, temperature=self.temperature)


class RecordedOld(TwoModels):
    """The recorded logprobs are the old policy's too, so that the ratio is not 1 and clips have something to do."""

    def old_logprobs(self, rollout: Rollout) -> PerToken:
        assert rollout.logprobs is not None
        return rollout.logprobs


def one_step(recording: Recording, setting: Setting, scratch: Path) -> Outcome:
    """Run one step; what this rank then knows, the same on every rank."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = _strategy(setting)
    objective = setting.objective
    module = (TwoModels if objective.dual_clip is None else RecordedOld)(
        str(recording.policy),
        CountsOnes(),
        optimizer=Optimizer("sgd", lr=LR, gradient_clipping=0.0),
        group_size=GROUP,
        max_response_length=LONGEST,
        temperature=objective.temperature,
        kl_coef=objective.kl_coef,
        kl_kind=objective.kl_kind,  # type: ignore[arg-type]
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        normalize_std=objective.advantages == "grpo",
        loss_aggregation=objective.loss_aggregation,  # type: ignore[arg-type]
        samples_per_update=None if objective.dual_clip is None else PROMPTS * GROUP,  # keeps the node `old_logprobs`
    )
    module.reference_model = str(recording.reference)
    data = PromptData(JSONL(str(recording.data)), prompts_per_step=PROMPTS)
    trainer = Trainer(
        run_dir=str(scratch / "run"),
        fast_dev_run=True,
        devices=world_size,
        accelerator="cpu",
        balance=setting.balance,  # type: ignore[arg-type]
        logprob_gap_limit=100.0,  # the recorded logprobs are no model's
    )
    engine = Recorded(recording)
    prepared = prepare(
        module,
        data,
        seed=0,
        world_size=world_size,
        tensor_parallel_size=1,
        max_steps=1,
        max_epochs=None,
        limit_val_batches=None,
        scratch=scratch,
    )
    Fabric(accelerator="cpu", devices=world_size, strategy=strategy).launch()
    gradients: list[dict[str, Tensor]] = []
    update = strategy.step

    def step(name: str) -> float:
        gradients.append({key: value.clone() for key, value in strategy.gradients(name).items()})
        return update(name)

    strategy.step = step  # type: ignore[method-assign]
    Run(trainer, module, data, prepared, strategy, engine).run()
    assert len(gradients) == 1
    weights = {key: value.clone() for bucket in strategy.weights("actor", 2**20) for key, value in bucket}
    return Outcome(gradients[0], weights)


def _strategy(setting: Setting) -> TrainingStrategy:
    if setting.stage is None:
        return SingleProcess(setting.precision, setting.token_budget, setting.packing)  # type: ignore[arg-type]
    return DeepSpeedStrategy(
        setting.stage,  # type: ignore[arg-type]
        setting.precision,  # type: ignore[arg-type]
        setting.token_budget,
        setting.packing,
    )
