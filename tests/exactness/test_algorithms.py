"""One step of every algorithm equals its float64 reference, however it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rlflow.algorithms
from rlflow import LoRA
from rlflow.testing.derivative import wide_casts
from tests.exactness import test_rows_of_rows as rows_of_rows
from tests.exactness.cases import CASES, LR, OFF, VARIATIONS, Case, truth
from tests.exactness.step import Outcome, one_step
from tests.exactness.step_record import USELESS, Recording, record
from tests.exactness.step_settings import COVER, LARGE, PRODUCT, RANKS, SMALL, Setting
from tests.ranks import RankPool
from tests.reference.policy_float64 import Objective
from tests.reference.update import Update
from tests.slow import slow_but
from tests.strategies.strategy_update import Stage

FLOAT32 = 1e-5  # norm of the difference over the norm
FLOAT64 = 1e-10
CLIPS = {"clip_low", "clip_high"}
# Every number of ranks once; by two stages what is not a sum over samples that look at their own group alone. The slow
# test of every setting has the others.
FEW = [("GRPO", COVER[ranks], ranks) for ranks in RANKS]
FEW += [(name, COVER[2][2:], 2) for name in ("PPO", "SFT", "DPO")] + [("KTO", COVER[2][2:3], 2)]
OVER_TOKENS = ("sequence-mean-token-sum", "constant", "sequence-mean-token-mean")  # and ranks

Truth = Callable[[str], dict[str, Update]]
ALL = CASES | VARIATIONS


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("exactness"))


@pytest.fixture(scope="module")
def expected(recording: Recording) -> Truth:
    """The reference's updates of a case, by role."""
    return cache(lambda name: truth(ALL[name], recording))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors, over the norm of the expected ones."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name].double() - expected[name]).square().sum()) for name in expected)
    return float((apart / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5)


def differences(outcomes: dict[str, Outcome], updates: dict[str, Update]) -> list[float]:
    """Differences of the gradient and the weights of every trained role."""
    assert outcomes.keys() == updates.keys()
    pairs = [(outcomes[role], update) for role, update in updates.items()]
    return [
        *(difference(outcome.gradient, update.gradient) for outcome, update in pairs),
        *(difference(outcome.weights, update.after_sgd) for outcome, update in pairs),
    ]


def check(
    name: str, settings: Sequence[Setting], ranks: RankPool, recording: Recording, expected: Truth, folder: Path
) -> None:
    """In every setting the gradients and weights on every rank are the reference's."""
    wrong = []
    for number, setting in enumerate(settings):
        given = recording, ALL[name], setting, folder / str(number)
        for rank, outcomes in enumerate(ranks.run(one_step, *given, timeout_s=240)):
            apart = differences(outcomes, expected(name))
            if not all(each <= FLOAT32 for each in apart):  # NaN is above it
                wrong.append(f"{setting} on rank {rank}: {apart}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "settings", "world_size"), FEW, ids=[f"{name}-{ranks}" for name, _, ranks in FEW])
def test_neither_ranks_nor_stage_nor_batches_nor_packing_nor_balance_move_the_step(
    name: str,
    settings: list[Setting],
    world_size: int,
    recording: Recording,
    expected: Truth,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    ranks = request.getfixturevalue(f"ranks{world_size}")
    check(name, settings, ranks, recording, expected, tmp_path)


@pytest.mark.parametrize(("name", "world_size"), [("GRPO", 2), ("PPO", 2)])
def test_the_step_is_the_same_by_fsdp(
    name: str,
    world_size: int,
    recording: Recording,
    expected: Truth,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    check(name, [Setting("fsdp", SMALL)], request.getfixturevalue(f"ranks{world_size}"), recording, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("name", ALL)
def test_the_step_is_the_reference_in_every_setting(
    name: str,
    world_size: int,
    recording: Recording,
    expected: Truth,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    check(name, PRODUCT[world_size], request.getfixturevalue(f"ranks{world_size}"), recording, expected, tmp_path)


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_on_two_ranks_every_aggregation_of_the_loss_is_the_reference_s(
    name: str, recording: Recording, expected: Truth, tmp_path: Path, ranks2: RankPool
) -> None:
    check(name, [Setting(2, token_budget=SMALL)], ranks2, recording, expected, tmp_path)


WAYS = {"small packed": (SMALL, True, 0), "large packed": (LARGE, True, 1), "small padded": (SMALL, False, 1)}
SOME = [(name, "small packed") for name in ALL]
SOME += [(name, way) for name in ("GRPO", "PPO", "SFT", "DPO") for way in ("large packed", "small padded")]


@pytest.mark.parametrize(("name", "way"), slow_but(SOME, [(name, way) for name in ALL for way in WAYS]))
def test_in_float64_without_deepspeed_the_step_is_the_reference(
    name: str, way: str, recording: Recording, expected: Truth, tmp_path: Path
) -> None:
    budget, packing, seed = WAYS[way]
    setting = Setting(None, budget, packing, seed=seed, precision="fp64", share_prefixes=False)
    assert all(
        each < FLOAT64 for each in differences(one_step(recording, ALL[name], setting, tmp_path), expected(name))
    )


@pytest.mark.parametrize("budget", [SMALL, LARGE])
@pytest.mark.parametrize("name", slow_but(("GRPO", "PPO", "DPO", "RewardModelTraining"), ALL))
def test_in_float64_rows_that_share_prefixes_make_the_step_of_the_reference(
    name: str, budget: int, recording: Recording, tmp_path: Path
) -> None:
    with wide_casts():
        outcomes = one_step(recording, ALL[name], Setting(None, budget, precision="fp64"), tmp_path)
        found = differences(outcomes, truth(ALL[name], recording))
    assert all(each < FLOAT64 for each in found)


@pytest.mark.parametrize(
    "name", slow_but(("GRPO", "PPO", "GSPO"), [name for name, case in CASES.items() if case.objective is not None])
)
def test_a_step_by_the_policy_that_sampled_is_the_reference(name: str, recording: Recording, tmp_path: Path) -> None:
    case = replace(CASES[name], past=False)
    outcomes = one_step(recording, case, Setting(None, SMALL, precision="fp64", share_prefixes=False), tmp_path)
    assert all(each < FLOAT64 for each in differences(outcomes, truth(case, recording)))


@pytest.mark.parametrize(
    ("name", "stage"),
    slow_but([("PPO", 2), ("GRPO", "fsdp")], [("GRPO", 0), ("DPO", 1), ("PPO", 2), ("GRPO", 3), ("GRPO", "fsdp")]),
)
def test_adapters_move_as_the_gradient_of_their_weights_says(
    name: str, stage: Stage, recording: Recording, expected: Truth, tmp_path: Path, ranks2: RankPool
) -> None:
    adapted = replace(CASES[name], more={**CASES[name].more, "lora": LoRA(rank=4, alpha=8.0)})
    full = expected(name)["actor"]
    for outcomes in ranks2.run(one_step, recording, adapted, Setting(stage, SMALL), tmp_path):
        outcome, seen, moved = outcomes["actor"], {}, dict(load_file(recording.policy / "model.safetensors"))
        for key in [key for key in outcome.adapters if ".lora_A." in key]:
            # y = (W + 2 B A) x, and B is 0: dB = 2 dW A', dA = 0, and the step by dB moves W by 2 dB A.
            weight, A = key.replace(".lora_A.", ".").removeprefix("base_model.model."), outcome.adapters[key].double()
            seen[key] = torch.zeros_like(A)
            seen[key.replace("lora_A", "lora_B")] = dB = 2 * full.gradient[weight] @ A.T
            moved[weight] = moved[weight] - LR * 2 * dB @ A
        assert difference(outcome.gradient, seen) < FLOAT32
        assert difference(outcome.weights, moved) < FLOAT32 / 10  # adapters move a weight little


def learns_from_differences(case: Case) -> bool:
    """Whether it is other responses that a response is compared with, and not what another model says of it."""
    if case.objective is None or case.algorithm in ("DAPO", "GAIL"):  # one refuses such groups, one has a judge
        return False
    return case.objective.advantages not in ("gae", "distillation")


@pytest.mark.parametrize(
    "name", slow_but(("GRPO", "RLOO"), [name for name, case in CASES.items() if learns_from_differences(case)])
)
def test_equal_rewards_move_no_weight(name: str, recording: Recording, tmp_path: Path) -> None:
    objective = replace(CASES[name].objective, kl_coef=0.0, entropy_coef=0.0, overlong_buffer=None, gamma=1.0)
    more = CASES[name].more | {"gamma": 1.0} if "gamma" in CASES[name].more else CASES[name].more
    case = replace(CASES[name], objective=objective, more=more, prompts=USELESS, data="useless", models={}, past=False)
    gradient = one_step(recording, case, Setting(None, SMALL), tmp_path)["actor"].gradient
    assert all((tensor == 0.0).all() for tensor in gradient.values())


@pytest.mark.parametrize("name", slow_but(["GRPO"], [name for name, case in ALL.items() if case.objective is not None]))
def test_every_setting_of_the_recorded_step_matters(name: str, recording: Recording, expected: Truth) -> None:
    for other in without_one_setting(ALL[name]):
        updates = truth(other, recording)
        moved = max(difference(updates[role].gradient, update.gradient) for role, update in expected(name).items())
        assert moved > 1e-3, other.objective  # a setting that may as well be off shows nothing


def without_one_setting(case: Case) -> list[Case]:
    """The case with one setting off at a time."""
    objective, plain = case.objective, Objective()
    assert objective is not None
    matters = {f.name for f in fields(Objective) if getattr(objective, f.name) != getattr(plain, f.name)}
    matters |= {"ppo": CLIPS, "gspo": CLIPS, "gmpo": CLIPS, "cpgd": CLIPS}.get(objective.surrogate, set())
    if objective.importance_mode == "truncate" and objective.anchor == "old":
        matters.add("importance_high")
    on = sorted(name for name in matters & OFF.keys() if getattr(objective, name) != OFF[name])
    return [replace(case, objective=replace(objective, **{name: OFF[name]})) for name in on]


def test_every_two_choices_of_settings_are_tried_together() -> None:
    ways = [(ranks, *vars(setting).items()) for ranks, settings in COVER.items() for setting in settings]
    choices = [sorted(set(values), key=str) for values in zip(*ways, strict=True)]
    for one, other in combinations(range(len(choices)), 2):
        met = {(way[one], way[other]) for way in ways}
        assert met == {(a, b) for a in choices[one] for b in choices[other]}


def test_every_algorithm_has_a_case() -> None:
    here = {case.algorithm for case in CASES.values()}
    there = {name.partition(" ")[0] for name in rows_of_rows.CASES}  # such as `TreeRL after 3 tokens`
    assert here | there | {"SelfDistillation"} == set(rlflow.algorithms.__all__) - {"PolicyGradient"}
