"""Several updates in a step equal a float64 reference that makes one after the other."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlflow.databuffer.rows import RowSpace
from rlflow.rollout.sampling import sampling_seed
from rlflow.testing.derivative import wide_casts
from rlflow.values.layout import Layout
from tests.exactness.cases import CASES, GRPO, Case, truth_of_updates
from tests.exactness.step import Outcome, one_step
from tests.exactness.step_record import GROUP, Recording, record
from tests.exactness.step_settings import LARGE, SMALL, Setting
from tests.exactness.test_algorithms import FLOAT32, FLOAT64, difference
from tests.ranks import RankPool
from tests.reference.update import Update
from tests.slow import slow_but

# Of 15 samples: mini-batches of 6, 6 and 3, so of four ranks one has nothing of the last.
SEVERAL = {"epochs": 2, "samples_per_update": 6}
UPDATES = 6
# With k3, whose gradient is exponential in the log ratio, updates of this learning rate diverge.
BASES = {
    "GRPO": replace(CASES["GRPO"], objective=replace(GRPO, kl_kind="k3-ratio", kl_coef=0.1)),
    "PPO": CASES["PPO"],
}
PROMPTS = len(CASES["GRPO"].prompts)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("several"))


def several(name: str, past: bool) -> Case:
    """The algorithm's case with several updates; without `past`, its own nodes say old logprobs and values."""
    return replace(BASES[name], more={**BASES[name].more, **SEVERAL}, past=past)


def mini_batches(seed: int) -> list[list[int]]:
    """For each update the numbers of its samples: which ones is a function of the seed, the step and their ids."""
    ids = torch.arange(PROMPTS * GROUP)
    here = Layout((0,), 1)
    rows = torch.stack([ids // GROUP, ids, *[torch.ones_like(ids)] * 4])
    of_ids = RowSpace.of_shards("rollout", here, [rows]).at(seed=seed).mini_batches(SEVERAL["samples_per_update"])
    again = torch.randperm(len(of_ids), generator=generator(sampling_seed(seed, 0, "epoch", (1,), 0))).tolist()
    number = numbers(seed)
    return [number[of_ids[n]].tolist() for n in (*range(len(of_ids)), *again)]


def numbers(seed: int) -> torch.Tensor:
    """For each id the number of its sample: ids are given in the order in which prompts are drawn."""
    key = hashlib.blake2b(f"{seed}/0/order".encode(), digest_size=7).digest()
    drawn = torch.randperm(PROMPTS, generator=generator(int.from_bytes(key, "big")))
    return (drawn[:, None] * GROUP + torch.arange(GROUP)).flatten()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def differences(outcomes: dict[str, Outcome], expected: dict[str, list[Update]]) -> list[float]:
    """Differences of every update's gradient, and of the weights after the last one, for every trained role."""
    assert outcomes.keys() == expected.keys()
    apart = []
    for role, updates in expected.items():
        gradients = zip(outcomes[role].gradients, updates, strict=True)
        apart += [difference(gradient, update.gradient) for gradient, update in gradients]
        apart.append(difference(outcomes[role].weights, updates[-1].after_sgd))
    return apart


@pytest.mark.parametrize(
    "past",
    [
        pytest.param(True, id="by a recorded policy", marks=pytest.mark.slow),
        pytest.param(False, id="by the policy itself"),
    ],
)
@pytest.mark.parametrize("name", BASES)
def test_in_float64_every_update_is_the_reference_s(
    name: str, past: bool, recording: Recording, tmp_path: Path
) -> None:
    case, setting = several(name, past), Setting(None, SMALL, seed=1, precision="fp64")
    with wide_casts():
        expected = truth_of_updates(case, recording, mini_batches(setting.seed))
        apart = differences(one_step(recording, case, setting, tmp_path), expected)
    assert all(x < FLOAT64 for x in apart), apart


ON_TWO, ON_FOUR, BY_FSDP = Setting(2, SMALL), Setting(3, LARGE, packing=False), Setting("fsdp", SMALL)
RUNS = [(name, *each) for name in BASES for each in ((2, ON_TWO), (4, ON_FOUR), (4, BY_FSDP))]


@pytest.mark.parametrize(("name", "world_size", "setting"), slow_but([("GRPO", 4, ON_FOUR), ("PPO", 2, ON_TWO)], RUNS))
def test_on_many_ranks_every_update_is_the_reference_s(
    name: str, world_size: int, setting: Setting, recording: Recording, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = several(name, past=False)
    expected = truth_of_updates(case, recording, mini_batches(setting.seed))
    assert [len(updates) for updates in expected.values()] == [UPDATES] * len(expected)
    ranks: RankPool = request.getfixturevalue(f"ranks{world_size}")
    for outcomes in ranks.run(one_step, recording, case, setting, tmp_path, timeout_s=240):
        apart = differences(outcomes, expected)
        assert all(x < FLOAT32 for x in apart), apart
