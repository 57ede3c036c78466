"""Small GRPO runs on gloo ranks, for the benchmarks that compare ways to run one; no benchmark itself.

Where a benchmark says that computation is emulated, nodes and engine sleep for a time given by their tokens: on two
cores that all ranks share, computation that hides communication, or other ranks' computation, would compete with it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

import rlflow.controller.step
import rlflow.run.fit
import rlflow.run.setup
from rlflow import Callback, PerSample, PerToken, PromptData, Trainer
from rlflow.algorithms import GRPO
from rlflow.data import JSONL
from rlflow.data.loader import Prefetch
from rlflow.databuffer.buffer import DataBuffer
from rlflow.databuffer.transport import Transport
from rlflow.rewards import SampleReward
from rlflow.rollout import Completion, Sampling, TransformersEngine
from rlflow.strategies import DeepSpeedStrategy
from rlflow.types import Sampled, Tokens, WithTexts

WARM_UP = 1  # steps of each run that are not counted


@dataclass(frozen=True)
class Parts:
    """The parts of a run that benchmarks may replace.

    Args:
        transport: Makes the transport of the ranks.
        buffer: Makes the buffer of a step's values.
        prompts: Reads them.
    """

    transport: Callable[..., Transport] = Transport
    buffer: Callable[[Transport], DataBuffer] = DataBuffer
    prompts: Callable[..., Any] = Prefetch


@dataclass(frozen=True)
class Trained:
    """The results of a run on one rank.

    Attributes:
        seconds: Seconds of each step after those that warm up, from the end of the step before.
        cpu_seconds: Processor time of this rank in each of these steps, whoever else was on its core meanwhile.
        metrics: Metrics of each of these steps.
        weights: Weights of the actor, in full; none on ranks without.
        counted: Counts of the transport, by the name of its attribute, `counted_...`.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    counted: dict[str, int]


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of a module on new gloo ranks of one thread; what it returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (world_size, folder, function, args), nprocs=world_size)
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(size) for name, size in sizes.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what runs say; errors go elsewhere
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.save(function(*args), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)  # taking torch down in good order costs seconds


def train(
    module: GRPO, data: PromptData, steps: int, parts: Parts | None = None, engine: Any = None, **settings: Any
) -> Trained:
    """Train on this rank, with others, for `WARM_UP` and then `steps` steps.

    Args:
        module: The algorithm.
        data: Prompts of the run.
        steps: Steps that count.
        parts: Other than a run's own.
        engine: Generates; transformers' where None.
        settings: Settings of the `Trainer`.
    """
    parts, clock, strategy = parts or Parts(), Clock(), settings.pop("strategy", None) or DeepSpeedStrategy(stage=2)
    made: list[Transport] = []

    def transport(*arguments: Any) -> Transport:
        made.append(parts.transport(*arguments))
        return made[-1]

    with tempfile.TemporaryDirectory() as folder, _instead(parts, transport):
        trainer = Trainer(
            settings.pop("run_dir", f"{folder}/run"),
            max_steps=WARM_UP + steps,
            devices=dist.get_world_size(),
            accelerator="cpu",
            strategy=strategy,
            rollout=engine or TransformersEngine(),
            callbacks=[clock],
            **settings,
        )
        trainer.fit(module, data)
        weights = {}
        if strategy.holds("actor"):
            weights = {name: each.clone() for bucket in strategy.weights("actor", 2**26) for name, each in bucket}
        dist.barrier()
    counted = {name: value for name, value in vars(made[-1]).items() if name.startswith("counted_")}
    seconds, cpu_seconds = clock.seconds[WARM_UP - 1 :], clock.cpu_seconds[WARM_UP - 1 :]
    return Trained(seconds, cpu_seconds, clock.metrics[WARM_UP:], weights, counted)


@contextlib.contextmanager
def _instead(parts: Parts, transport: Callable[..., Transport]) -> Any:
    """A run builds its parts itself; within this it builds these."""
    places: list[tuple[Any, str, Any]] = [
        (rlflow.run.setup, "Transport", transport),
        (rlflow.run.fit, "Prefetch", parts.prompts),
        (rlflow.controller.step, "DataBuffer", parts.buffer),
    ]
    before = [getattr(place, name) for place, name, _ in places]
    for place, name, part in places:
        setattr(place, name, part)
    try:
        yield
    finally:
        for (place, name, _), part in zip(places, before, strict=True):
            setattr(place, name, part)


class Clock(Callback):
    """Seconds, and those on a core, from the end of each step to the end of the next; and the metrics of each."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self._ended = (0.0, 0.0)

    def on_step_end(self, trainer: Trainer, module: Any, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter(), time.process_time()
        if self.metrics:
            self.seconds.append(now[0] - self._ended[0])
            self.cpu_seconds.append(now[1] - self._ended[1])
        self._ended = now
        self.metrics.append(dict(metrics))


def step_seconds(ranks: Sequence[Trained]) -> list[float]:
    """Seconds of each step on its slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*(rank.seconds for rank in ranks), strict=True)]


def busiest_cpu_seconds(ranks: Sequence[Trained]) -> list[float]:
    """Processor seconds of each step on the rank that computes most."""
    return [max(of_ranks) for of_ranks in zip(*(rank.cpu_seconds for rank in ranks), strict=True)]


def spread(times: Sequence[float]) -> str:
    """`1.23 s (1.10 to 1.50, n=6)`."""
    return f"{statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, n={len(times)})"


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that depend on neither clocks nor how data travel."""
    clocks = ("time/", "exchange/", "balance/", "straggler/")
    return {name: value for name, value in metrics.items() if not name.startswith(clocks)}


def prompts(folder: Path, count: int, prompts_per_step: int) -> PromptData:
    """Prompts such as `3+1=`, the same number of tokens each."""
    file = folder / "prompts.jsonl"
    if not file.exists():
        file.write_text("".join(f'{{"prompt": "{i % 10}+{i * 7 % 10}="}}\n' for i in range(count)))
    return PromptData(JSONL(str(file)), prompts_per_step=prompts_per_step, prompt="prompt", shuffle=False)


class OddCharacters(SampleReward):
    """A reward of as many points as the response has characters of odd code: random responses differ in it."""

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float(sum(ord(character) % 2 for character in text))


class ScriptedEngine(TransformersEngine):
    """Takes weights as ever, and answers with random tokens of log-normal length at no cost but a sleep.

    Args:
        mean: Tokens of a response, on average; none is longer than what is asked for.
        sigma: Standard deviation of the logarithm of its length.
        seconds: Seconds for one call, whatever it is asked for.
        seconds_per_token: Further seconds for each token of all responses of a call.
    """

    def __init__(self, mean: float, sigma: float, seconds: float = 0.0, seconds_per_token: float = 0.0) -> None:
        super().__init__()
        self.mean, self.sigma, self.seconds, self.seconds_per_token = mean, sigma, seconds, seconds_per_token

    def _generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[Completion]:
        completions = [self._answer(seed, sampling) for seed in seeds]
        time.sleep(self.seconds + self.seconds_per_token * sum(len(each.token_ids) for each in completions))
        return completions

    def _answer(self, seed: int, sampling: Sampling) -> Completion:
        draws = np.random.default_rng(seed)
        length = draws.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma)
        length = max(1, min(int(length), sampling.max_tokens))
        letters = tuple(draws.integers(20, 90, length).tolist())
        return Completion(letters, (-4.0,) * length, length < sampling.max_tokens)


class EmulatedGRPO(GRPO):
    """GRPO whose nodes compute, and in addition sleep as long as larger models would compute.

    Attributes:
        reward_s: Seconds of the reward, for each response.
        score_s: Seconds of a forward pass, for each token.
        train_s: Seconds of forward and backward passes, for each token.
    """

    reward_s = score_s = train_s = 0.0

    def rewards(
        self, rollout: WithTexts, model_scores: PerSample | None = None, kl_penalty: PerToken | None = None
    ) -> PerSample:
        time.sleep(self.reward_s * len(rollout.lengths))
        return super().rewards(rollout, model_scores, kl_penalty)

    def ref_logprobs(self, rollout: Tokens) -> PerToken:
        time.sleep(self.score_s * float(rollout.lengths.sum()))
        return super().ref_logprobs(rollout)

    def actor_loss(
        self,
        rollout: Sampled,
        advantages: PerSample,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
    ) -> PerToken:
        time.sleep(self.train_s * float(rollout.lengths.sum()))
        return super().actor_loss(rollout, advantages, old_logprobs, ref_logprobs)
