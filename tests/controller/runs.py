"""Whole runs on real ranks, and the modules, engines and strategies that the tests give them."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from rlflow import Batch, LoRA, PerSample, PerToken, Rollout, ValueModel, node
from rlflow.algorithms import GRPO, SFT, ReMax
from rlflow.callbacks import Callback
from rlflow.data.prompts import PromptData
from rlflow.errors import UserError
from rlflow.functional import KL
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.module import RLModule
from rlflow.rewards import SampleReward
from rlflow.rollout.engine import RolloutEngine, SyncReport, WeightSyncError
from rlflow.rollout.transformers import TransformersEngine
from rlflow.rollout.vllm import VLLMEngine
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, SingleProcess, TrainingStrategy
from rlflow.trainer import Trainer
from rlflow.types import WithDatasetRows
from tests.algorithm_factory import made
from tests.data.list_source import Listed

ZERO2, ZERO3, FSDP = partial(DeepSpeedStrategy, 2), partial(DeepSpeedStrategy, 3), FSDPStrategy
SGD = Optimizer("sgd", lr=0.1, gradient_clipping=0.0)


@dataclass(frozen=True)
class Fit:
    """A run; what a rank gets of it is a copy of its own."""

    module: RLModule
    data: PromptData
    folder: Path
    strategy: Callable[[], TrainingStrategy] = SingleProcess
    engine: RolloutEngine = field(default_factory=TransformersEngine)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The results of a run on one rank.

    Attributes:
        steps: The metrics of each step that was done.
        weights: Weights of the actor, full.
        record: Record of the module, if it has one.
        summary: Summary of the run; empty if it failed.
        error: Error that ended it, if it failed.
    """

    steps: list[dict[str, float]]
    weights: dict[str, Tensor]
    record: Any
    summary: dict[str, Any]
    error: str = ""


class Remembers(Callback):
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        self.steps.append(dict(metrics))


def fit(run: Fit) -> Result:
    """Run to the end on this rank."""
    remembers, strategy = Remembers(), run.strategy()
    summary = trainer_of(run, strategy, [remembers]).fit(run.module, run.data)
    return Result(remembers.steps, _weights(strategy), getattr(run.module, "record", None), summary)


def failing_fit(run: Fit) -> Result:
    """Run to the error that ends it on this rank."""
    remembers, strategy = Remembers(), run.strategy()
    try:
        trainer_of(run, strategy, [remembers]).fit(run.module, run.data)
    except (UserError, WeightSyncError) as error:
        with contextlib.suppress(AttributeError):  # it was never set up
            run.engine.close()
        return Result(remembers.steps, _weights(strategy), getattr(run.module, "record", None), {}, str(error))
    raise AssertionError("the run did not fail")


def failing_fit_of(runs: Sequence[Fit]) -> str:
    """Each rank runs its own; what it says."""
    run = runs[dist.get_rank()]
    try:
        trainer_of(run, run.strategy(), []).fit(run.module, run.data)
    except UserError as error:
        return str(error)
    raise AssertionError("the run did not fail")


def trainer_of(run: Fit, strategy: TrainingStrategy, more: Sequence[Callback]) -> Trainer:
    """The trainer of a run, with more callbacks."""
    settings = {"max_steps": 1, **run.settings}
    callbacks = [*more, *settings.pop("callbacks", ())]
    return Trainer(
        str(run.folder),
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        accelerator="cpu",
        strategy=strategy,
        rollout=run.engine,
        callbacks=callbacks,
        **settings,
    )


def _weights(strategy: TrainingStrategy) -> dict[str, Tensor]:
    if "actor" not in strategy.roles:
        return {}
    return {name: weight.clone() for bucket in strategy.weights("actor", 2**20) for name, weight in bucket}


class OddCharacters(SampleReward):
    """A reward of as many points as the response has characters of odd code."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(sum(ord(character) % 2 for character in text))


@dataclass(eq=False)
class RaggedGRPO(GRPO):
    """GRPO whose random model ends a response after about six tokens."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))


def grpo(model: Path, **settings: Any) -> RaggedGRPO:
    """GRPO that changes the weights a lot at every step."""
    given = {"optimizer": Optimizer("adamw", lr=3e-3), "group_size": 4, "max_response_length": 12, **settings}
    return made(RaggedGRPO, model, OddCharacters(), **given)


@dataclass(eq=False)
class RaggedReMax(ReMax):
    """ReMax that also scores its greedy responses, so that they move to where the actor's rows lie."""

    stop_token_ids: tuple[int, ...] = tuple(range(40, 60))

    @node(role="actor")
    def greedy_logprobs(self, greedy: Rollout) -> PerToken:
        logprobs: PerToken = self.actor.logprobs(greedy)
        self.log("greedy/logprobs", logprobs, greedy.loss_mask)
        return logprobs


def terse(model: Path, folder: Path) -> Path:
    """A copy of a model, for which every token ends a response."""
    shutil.copytree(model, folder)
    every = list(range(AutoConfig.from_pretrained(folder).vocab_size))
    GenerationConfig(eos_token_id=every).save_pretrained(folder)
    return folder


def sums(count: int, prompts_per_step: int, held_out: int = 0) -> PromptData:
    """Prompts such as `3+1=`."""
    rows = [{"question": f"{i}+{i * 7 % 10}="} for i in range(count)]
    validation = Listed(rows[:held_out]) if held_out else None
    return PromptData(Listed(rows), validation, prompts_per_step)


def answers(lengths: Sequence[int], prompts_per_step: int, shuffle: bool = True) -> PromptData:
    """Prompts with responses of these lengths, the end of text not counted; rows are numbered."""
    rows = [
        {"question": f"{i}=", "answer": "0123456789abcdef"[:length], "number": i} for i, length in enumerate(lengths)
    ]
    return PromptData(Listed(rows), None, prompts_per_step, response="answer", shuffle=shuffle)


class RecordingSFT(SFT):
    """Two passes over mini-batches of two rows. Records the rows drawn over all ranks, held here, and trained here."""

    def __init__(self, model: str) -> None:
        super().__init__(CausalLM(model, optimizer=SGD, epochs=2, samples_per_update=2))
        self.record: dict[str, list[list[int]]] = {"drawn": [], "held": [], "trained": []}

    @node
    def numbers(self, batch: WithDatasetRows) -> PerSample:
        numbers = torch.tensor([row["number"] for row in batch.rows], dtype=torch.int64)
        self.record["held"].append(numbers.tolist())
        self.record["drawn"].append(self.all_rows(numbers).tolist())
        return numbers

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch, numbers: PerSample) -> PerToken:
        self.record["trained"].append(numbers.tolist())
        return super().actor_loss(batch)


class MovingGRPO(RaggedGRPO):
    """Records, of the rows that this rank trains, prompt ids' and responses' lengths."""

    record: list[tuple[int, int]]

    @node(role="actor", type="train")
    def actor_loss(self, rollout: Rollout, advantages: PerSample) -> PerToken:
        self.record = list(zip(rollout.prompt_ids.lengths.tolist(), rollout.lengths.tolist(), strict=True))
        return super().actor_loss(rollout, advantages)


class Unmasked(SFT):
    """SFT in whose batch no token counts."""

    @node
    def nothing(self, batch: Batch) -> Batch:
        return dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))

    @node(role="actor", type="train")
    def actor_loss(self, nothing: Batch) -> PerToken:
        return -self.actor.logprobs(nothing)


class NotFinite(SFT):
    """SFT whose loss is NaN in the given steps, counted from 0, on the last rank alone."""

    def __init__(self, model: str, steps: Sequence[int]) -> None:
        super().__init__(CausalLM(model, optimizer=SGD))
        self.steps = steps
        self.calls = -1

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        self.calls += 1
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return -self.actor.logprobs(batch) * (float("nan") if last and self.calls in self.steps else 1.0)


class TwoTrained(NotFinite):
    """Two roles; the second one's loss is always finite."""

    def configure_models(self) -> None:
        super().configure_models()
        self.other = CausalLM(self.actor.model, optimizer=SGD)

    @node(role="other", type="train")
    def other_loss(self, batch: Batch) -> PerToken:
        return -self.other.logprobs(batch)


class ActorCritic(SFT):
    """Two roles of two kinds: the critic learns the length of what is still to come."""

    def __init__(self, model: str, optimizer: Optimizer = SGD, actor_start_step: int = 0) -> None:
        super().__init__(CausalLM(model, optimizer=optimizer, start_step=actor_start_step))
        self.critic = ValueModel(model, optimizer=optimizer)

    @node(role="critic")
    def old_values(self, batch: Batch) -> PerToken:
        return self.critic.values(batch)

    @node(role="critic")
    def last_values(self, batch: Batch) -> PerSample:
        return self.critic.final_values(batch)

    @node(role="critic", type="train")
    def critic_loss(self, batch: Batch, old_values: PerToken, last_values: PerSample) -> PerToken:
        self.log("critic/value", old_values, batch.loss_mask)
        self.log("critic/last_value", last_values)
        to_come = batch.loss_mask.flip(1).cumsum(1).flip(1)
        return (self.critic.values(batch) - to_come) ** 2


class AdapterGRPO(RaggedGRPO):
    """GRPO that trains adapters; its reference is the model without them."""

    def __init__(self, model: str) -> None:
        actor = CausalLM(model, optimizer=Optimizer("adamw", lr=3e-2), lora=LoRA(rank=4))
        super().__init__(actor, OddCharacters(), group_size=4, max_response_length=12, kl=KL(0.1))


class StopsAfter(Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Any) -> None:
        trainer.should_stop |= step == self.step


class SkipsASync(VLLMEngine):
    """Takes the first weights and no others."""

    def update_weights(self, buckets: Any, version: int) -> SyncReport:
        if version == 0:
            return super().update_weights(buckets, version)
        return SyncReport(version, 0, 0, 0.0)


class Lies(TransformersEngine):
    """Takes the first weights, and says of later ones that it holds them."""

    def update_weights(self, buckets: Any, version: int) -> SyncReport:
        if version == 0:
            return super().update_weights(buckets, version)
        self.policy_version = version
        return SyncReport(version, len([name for bucket in buckets for name, _ in bucket]), 0, 0.0)


class LeavesOneOut(DeepSpeedStrategy):
    """Hands out all weights but one from the second time on."""

    times = 0

    def weights(self, name: str, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        self.times += 1
        for bucket in super().weights(name, bucket_bytes):
            yield [(key, weight) for key, weight in bucket if key != "model.norm.weight" or self.times == 1]


class Paired(TransformersEngine):
    """Two ranks share it: both are asked alike, and answer alike."""

    tensor_parallel_size = 2
