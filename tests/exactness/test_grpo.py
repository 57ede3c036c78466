"""One step of GRPO equals its float64 reference, however it is run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlflow.models.tiny import write_tiny_model
from tests.exactness.step import GROUP, LONGEST, LR, OBJECTIVE, PROMPTS, Recording, Setting, one_step
from tests.ranks import RankPool
from tests.reference.policy_float64 import Folders, Objective, Sample, policy_update
from tests.reference.update import Step, Update

FLOAT32 = 1e-5  # norm of the difference over the norm
FLOAT64 = 1e-10
SMALL, LARGE = 20, 4096  # token budgets: micro-batches of one or two samples, and all samples in one
AGGREGATIONS = ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Prompts of 1 to 5 tokens with 3 ragged responses each, and rollout logprobs that are up to 0.3 off."""
    folder = tmp_path_factory.mktemp("exactness")
    policy, reference = (
        write_tiny_model(folder / f"model{seed}", seed=seed, hidden_size=64, intermediate_size=96, layers=2)
        for seed in (1, 2)
    )
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"question": "abcde"[: p + 1]}) + "\n" for p in range(PROMPTS)))
    tokenizer, draw = AutoTokenizer.from_pretrained(policy), random.Random(3)
    responses = []
    for _ in range(PROMPTS * GROUP):
        text = "".join(draw.choice("0123") for _ in range(draw.randint(1, LONGEST - 1)))
        tokens = (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)
        responses.append((tokens, tuple(-4.85 + draw.uniform(-0.3, 0.3) for _ in tokens)))
    return Recording(policy, reference, data, [responses[p * GROUP : (p + 1) * GROUP] for p in range(PROMPTS)])


Truth = Callable[[Objective], Update]


@pytest.fixture(scope="module")
def truth(recording: Recording) -> Truth:
    """The reference's update for an objective."""
    tokenizer = AutoTokenizer.from_pretrained(recording.policy)
    (one,) = tokenizer("1")["input_ids"]
    samples = [
        Sample(tokenizer("abcde"[: p + 1])["input_ids"], tokens, float(tokens.count(one)), p, rollout_logprobs=logprobs)
        for p, group in enumerate(recording.responses)
        for tokens, logprobs in group
    ]

    @cache
    def update(objective: Objective) -> Update:
        old = [replace(sample, old_logprobs=sample.rollout_logprobs) for sample in samples]
        given = samples if objective.dual_clip is None else old
        return policy_update(recording.policy, given, objective, Step(lr=LR), Folders(recording.reference))

    return update


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors, over the norm of the expected ones."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    return float((apart / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5)


def check(settings: list[Setting], ranks: RankPool, recording: Recording, truth: Truth, path: Path) -> None:
    """Every setting's gradient and weights on every rank are the reference's."""
    wrong = []
    for number, setting in enumerate(settings):
        expected = truth(setting.objective)
        for rank, outcome in enumerate(ranks.run(one_step, recording, setting, path / str(number), timeout_s=240)):
            gradient, moved = (
                difference(outcome.gradient, expected.gradient),
                difference(outcome.weights, expected.after_sgd),
            )
            if max(gradient, moved) > FLOAT32:
                wrong.append(f"{setting} on rank {rank}: gradient {gradient:.1e}, weights {moved:.1e}")
    assert not wrong, "\n".join(wrong)


GRID = [
    Setting(stage, token_budget=budget, packing=packing)
    for stage, budget, packing in product((0, 1, 2, 3), (SMALL, LARGE), (True, False))
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_step_depends_on_neither_zero_stage_nor_micro_batches_nor_packing_nor_ranks(
    world_size: int, recording: Recording, truth: Truth, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    check(GRID, request.getfixturevalue(f"ranks{world_size}"), recording, truth, tmp_path)


def test_every_loss_aggregation_is_that_of_the_whole_batch_over_ranks(
    recording: Recording, truth: Truth, tmp_path: Path, ranks2: RankPool
) -> None:
    settings = [
        Setting(2, token_budget=SMALL, objective=replace(OBJECTIVE, loss_aggregation=mode)) for mode in AGGREGATIONS
    ]
    check(settings, ranks2, recording, truth, tmp_path)


@pytest.mark.parametrize(
    "objective",
    [
        replace(OBJECTIVE, advantages="dr_grpo"),
        replace(OBJECTIVE, kl_kind="k1"),
        replace(OBJECTIVE, kl_kind="k2"),
        replace(OBJECTIVE, dual_clip=1.1),
    ],
    ids=["advantages without std", "k1", "k2", "dual clip"],
)
def test_every_variation_of_the_loss_is_the_reference_s(
    objective: Objective, recording: Recording, truth: Truth, tmp_path: Path, ranks2: RankPool
) -> None:
    plain = replace(objective, dual_clip=100.0) if objective.dual_clip is not None else OBJECTIVE  # 100 never binds
    assert difference(truth(objective).gradient, truth(plain).gradient) > 0.01  # it matters here
    check([Setting(2, token_budget=SMALL, objective=objective)], ranks2, recording, truth, tmp_path)


def test_the_step_does_not_depend_on_where_rows_are_trained(
    recording: Recording, truth: Truth, tmp_path: Path, ranks4: RankPool
) -> None:
    check([Setting(2, balance=balance) for balance in ("auto", "off")], ranks4, recording, truth, tmp_path)


@pytest.mark.parametrize(("budget", "packing"), [(SMALL, True), (LARGE, True), (SMALL, False)])
def test_in_float64_without_deepspeed_the_step_is_the_reference(
    budget: int, packing: bool, recording: Recording, truth: Truth, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    outcome = one_step(recording, Setting(None, "fp64", budget, packing), tmp_path)
    expected = truth(OBJECTIVE)
    assert difference(outcome.gradient, expected.gradient) < FLOAT64
    assert difference(outcome.weights, expected.after_sgd) < FLOAT64
