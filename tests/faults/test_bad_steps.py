"""A bad number on one rank: all ranks skip the update to the bit, count it, and stop after a set number in a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow import Batch, PerToken, node
from rlflow.algorithms import SFT
from rlflow.models.causal_lm import CausalLM
from rlflow.models.optimizer import Optimizer
from rlflow.models.tiny import write_tiny_model
from rlflow.rewards.reward import OnError, RewardInput, Scores
from rlflow.strategies import DeepSpeedStrategy, FSDPStrategy, TrainingStrategy
from tests import own_folder
from tests.algorithm_factory import made
from tests.controller.runs import Fit, OddCharacters, RaggedGRPO, Result, answers, failing_fit, fit, sums
from tests.faults.running import fit as command
from tests.ranks import RankPool
from tests.slow import slow_but

pytestmark = pytest.mark.row("bad steps")

STRATEGIES = {
    "zero1": partial(DeepSpeedStrategy, 1),
    "zero2": partial(DeepSpeedStrategy, 2),
    "zero3": partial(DeepSpeedStrategy, 3),
    "fsdp": FSDPStrategy,
    "zero2-bf16": partial(DeepSpeedStrategy, 2, precision="bf16"),
    "fsdp-bf16": partial(FSDPStrategy, precision="bf16"),
}
SOME = [pytest.param(name, marks=() if name == "zero2" else pytest.mark.slow) for name in STRATEGIES]
ADAM = Optimizer("adamw", lr=1e-2)
LENGTHS = (3, 9, 1, 12)
TIMES = 20.0
SKIPPED_BY_BOTH = "faults of one rank skipped by both, weights and moments to the bit"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("policy") / "policy", seed=1, intermediate_size=96)


class Spoiled(SFT):
    """The loss of the last rank is multiplied by `factor` in the steps given, counted from 0."""

    def __init__(self, model: str, factor: float, steps: Sequence[int]) -> None:
        super().__init__(CausalLM(model, optimizer=ADAM))
        self.factor = factor
        self.steps = steps
        self.calls = -1

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        self.calls += 1
        return self.spoil(-self.actor.logprobs(batch))

    def spoil(self, losses: Tensor) -> Tensor:
        return losses * self.factor_of_now()

    def factor_of_now(self) -> float:
        spoils = dist.get_rank() == dist.get_world_size() - 1 and self.calls in self.steps
        return self.factor if spoils else 1.0


class SpoiledBackwards(Spoiled):
    """The loss is as it is without a fault; the gradient of all weights is multiplied."""

    def spoil(self, losses: Tensor) -> Tensor:
        factor = self.factor_of_now()
        losses.register_hook(lambda gradient: gradient * factor)
        return losses


class SpoiledEmbedding(Spoiled):
    """The loss is as it is without a fault; the gradient of the embedding alone is multiplied."""

    hooked = False

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        if not self.hooked:
            (embedding,) = (each for each in self.actor._forward.modules() if isinstance(each, nn.Embedding))
            embedding.register_forward_hook(self.hook)
            self.hooked = True
        return super().actor_loss(batch)

    def spoil(self, losses: Tensor) -> Tensor:
        return losses

    def hook(self, _: nn.Module, __: Any, embedded: Tensor) -> None:
        if embedded.requires_grad:
            factor = self.factor_of_now()
            embedded.register_hook(lambda gradient: gradient * factor)


def run(
    how: Callable[[Fit], Result],
    ranks: RankPool,
    policy: Path,
    folder: Path,
    strategy: Callable[[], TrainingStrategy],
    spoiled: tuple[float, Sequence[int]],
    steps: int,
    kind: type[Spoiled] = Spoiled,
    **more: Any,
) -> list[Result]:
    module = kind(str(policy), *spoiled)
    settings = {"max_steps": steps, "grad_norm_spike_limit": TIMES, **more}
    return ranks.run(how, Fit(module, answers(LENGTHS, 4), folder, strategy, settings=settings), timeout_s=200)


FAULTS = {
    "a loss that is NaN": (Spoiled, float("nan")),
    "an infinite loss": (Spoiled, float("inf")),
    "a spike": (Spoiled, 1e6),
    "a gradient that is NaN": (SpoiledBackwards, float("nan")),
    "an infinite gradient": (SpoiledBackwards, float("inf")),
    "an embedding's gradient that is NaN": (SpoiledEmbedding, float("nan")),
}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("fault", slow_but([*FAULTS][::3], FAULTS))
def test_one_rank_spoils_an_update_and_all_leave_weights_and_optimizer_as_they_were(
    fault: str, name: str, policy: Path, tmp_path: Path, ranks2: RankPool, counted: Callable[..., None]
) -> None:
    kind, factor = FAULTS[fault]
    # The 9th update is spoiled, after 8 norms were seen; the 9th of a run without is the 10th of one with.
    spoiled = run(fit, ranks2, policy, tmp_path / "spoiled", STRATEGIES[name], (factor, (8,)), 10, kind)
    plain = run(fit, ranks2, policy, tmp_path / "plain", STRATEGIES[name], (1.0, ()), 9)
    for with_fault, without in zip(spoiled, plain, strict=True):
        assert [step.get("actor/skipped_updates", 0) for step in with_fault.steps] == [0] * 8 + [1, 0]
        assert with_fault.weights.keys() == without.weights.keys() != set()
        assert all(torch.equal(with_fault.weights[key], without.weights[key]) for key in without.weights)
        if kind is not Spoiled:
            assert all(math.isfinite(step["actor/loss"]) for step in with_fault.steps)
            counted("of them beside a finite loss", fault)
    counted(SKIPPED_BY_BOTH, fault)
    counted("strategies and precisions", name)


def test_a_spike_just_after_a_resume_is_skipped_as_without_the_break(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    whole = run(fit, ranks2, policy, tmp_path / "whole", STRATEGIES["zero2"], (1e6, (8,)), 10)
    run(fit, ranks2, policy, tmp_path / "parts", STRATEGIES["zero2"], (1.0, ()), 8, save_every_n_steps=8)
    rest = run(fit, ranks2, policy, tmp_path / "parts", STRATEGIES["zero2"], (1e6, (0,)), 10, ckpt_path="last")
    for at_once, continued in zip(whole, rest, strict=True):
        assert [step.get("actor/skipped_updates", 0) for step in continued.steps] == [1, 0]
        assert at_once.weights.keys() == continued.weights.keys() != set()
        assert all(torch.equal(at_once.weights[key], continued.weights[key]) for key in at_once.weights)


@pytest.mark.parametrize("factor", [float("nan"), pytest.param(1e6, marks=pytest.mark.slow)], ids=["nan", "spike"])
def test_the_third_bad_update_in_a_row_ends_the_run_and_stores_its_input(
    factor: float, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    results = run(failing_fit, ranks2, policy, tmp_path, STRATEGIES["zero2"], (factor, (8, 9, 10)), 12)
    for rank, result in enumerate(results):
        assert len(result.steps) == 10
        how = "infinite or NaN" if factor != factor else r"where up to"
        assert "in 3 updates in a row" in result.error
        assert how in result.error
        assert (tmp_path / f"inputs/step-00000011/actor_loss-{rank:05d}-of-00002.safetensors").is_file()


REWARDS = [
    ("nan", "it returned nan"),
    ("returns_infinity_in_float32", "it returned 1e+308, which float32 cannot hold"),
    ("nan_on_rank_1", "it returned nan"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "told"), REWARDS)
def test_a_reward_that_is_not_finite_ends_the_run_in_a_line(
    function: str, told: str, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    own_folder.make(tmp_path)
    more = (tmp_path / "my_rewards.py").read_text()
    one = (
        '\n\ndef nan_on_rank_1(response, row):\n    return float("nan" if os.environ.get("LOCAL_RANK") == "1" else 1)\n'
    )
    (tmp_path / "my_rewards.py").write_text(more + one)
    own_folder.write(tmp_path / "my.yaml", own_folder.TWO_RANKS | own_folder.rewarded_by(function))
    ended = command(tmp_path, "--config", "my.yaml")
    assert ended.code != 0
    assert "failed on sample" in ended.errors
    assert told in ended.errors
    assert "Traceback" not in ended.errors
    seen("a reward that is not finite ends the run in a line")


class FailingAt(OddCharacters):
    """Gives NaN for all samples of these calls, counted from 0."""

    def __init__(self, on_error: OnError, calls: Sequence[int]) -> None:
        super().__init__(on_error)
        self.calls = calls
        self.call = -1

    def score(self, responses: RewardInput) -> Scores:
        self.call += 1
        return super().score(responses)

    def score_sample(self, text: str, row: dict[str, Any]) -> float:
        return float("nan") if self.call in self.calls else super().score_sample(text, row)


def rewarded(policy: Path, folder: Path, calls: Sequence[int], name: str = "zero2", **more: Any) -> Fit:
    """GRPO in updates of `samples_per_update` of 16 samples, whose reward fails at these calls."""
    of_actor = {name: more.pop(name) for name in ("samples_per_update", "epochs") if name in more}
    given = {"optimizer": ADAM, "max_response_length": 12, **of_actor}
    module = made(RaggedGRPO, policy, FailingAt("drop", calls), group_size=4, **given)
    return Fit(module, sums(12, 4), folder, STRATEGIES[name], settings=more)


@pytest.mark.parametrize("name", SOME)
def test_a_reward_that_fails_on_all_samples_changes_no_weights_or_optimizer(
    name: str, policy: Path, tmp_path: Path, ranks2: RankPool, counted: Callable[..., None]
) -> None:
    kept = {"save_every_n_steps": 1, "save_last": 3, "max_steps": 3}
    for result in ranks2.run(fit, rewarded(policy, tmp_path, (1,), name, **kept), timeout_s=200):
        assert [step.get("actor/skipped_updates", 0) for step in result.steps] == [0, 1, 0]
        assert [step["reward/errors"] for step in result.steps] == [0, 16, 0]
        assert ["actor/loss" in step for step in result.steps] == [True, False, True]
    first, second, third = (tensors(tmp_path / f"checkpoint/step-{step:08d}") for step in (1, 2, 3))
    assert first == second != third
    assert first.keys() == third.keys() != set()
    counted("strategies and precisions", name)
    counted(SKIPPED_BY_BOTH, "a reward that is NaN")


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of all tensors' files, by name."""
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in sorted(checkpoint.rglob("*.safetensors"))}


def test_an_update_that_is_skipped_in_every_epoch_counts_once(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    run = rewarded(policy, tmp_path, (0, 1), max_steps=3, epochs=4)
    for result in ranks2.run(fit, run, timeout_s=200):
        assert [step.get("actor/skipped_updates", 0) for step in result.steps] == [1, 1, 0]
        assert ["actor/loss" in step for step in result.steps] == [False, False, True]


def test_three_updates_in_a_row_without_samples_end_the_run_and_store_the_input(
    policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    results = ranks2.run(failing_fit, rewarded(policy, tmp_path, (1, 2, 3), max_steps=5), timeout_s=200)
    for rank, result in enumerate(results):
        assert len(result.steps) == 3
        assert "the reward of `actor` failed on all samples in 3 updates in a row, which were skipped" in result.error
        assert (tmp_path / f"inputs/step-00000004/actor_loss-{rank:05d}-of-00002.safetensors").is_file()
