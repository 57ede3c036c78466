"""One step of models whose layers carry a state equals its float64 reference, however it is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from rlflow.testing.derivative import wide_casts
from tests.exactness.cases import CASES, truth
from tests.exactness.step import one_step
from tests.exactness.step_record import Recording, record
from tests.exactness.step_settings import LARGE, RANKS, SMALL, Setting
from tests.exactness.test_algorithms import FLOAT64, check, differences
from tests.families.models import write_family
from tests.reference.update import Update
from tests.slow import slow_but

# A delta rule, the same with experts, Mamba's scan, a short convolution; transformers has a critic of the first alone.
ALGORITHMS = {
    "qwen3_5": ("GRPO", "PPO", "DPO", "SFT"),
    "qwen3_5_moe": ("GRPO", "DPO", "SFT"),
    "falcon_h1": ("GRPO", "DPO", "SFT"),
    "lfm2": ("GRPO", "DPO", "SFT"),
}
MODELS = [(family, name) for family, names in ALGORITHMS.items() for name in names]
EMPTY = ((4, 0),)  # (prompt, response); others of the recording are cut off

WAYS = {
    "packed": Setting(None, LARGE, precision="fp64"),
    "few rows": Setting(None, SMALL, precision="fp64", seed=1),
    "padded": Setting(None, LARGE, packing=False, precision="fp64"),
    "checkpointed": Setting(None, LARGE, precision="fp64", checkpointing=True),
}
SHARDED = [
    Setting(0, LARGE),
    Setting(2, SMALL, balance="off", checkpointing=True),
    Setting(3, SMALL, seed=1, checkpointing=True),
    Setting("fsdp", LARGE, seed=1),
]


@pytest.fixture(scope="module")
def recording_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """The recording of a step of a family's model."""
    return cache(lambda family: record(tmp_path_factory.mktemp(family), partial(write_family, family), EMPTY))


@pytest.fixture(scope="module")
def expected(recording_of: Callable[[str], Recording]) -> Callable[[str, str], dict[str, Update]]:
    """The reference's updates of a family's model in a case, by role."""

    @cache
    def of_case(family: str, name: str) -> dict[str, Update]:
        with wide_casts():
            return truth(CASES[name], recording_of(family))

    return of_case


@pytest.mark.parametrize(
    ("family", "name", "way"),
    slow_but([("qwen3_5", "GRPO", "packed")], [(*model, way) for model in MODELS for way in WAYS]),
)
def test_in_float64_the_step_is_the_reference_s(
    family: str,
    name: str,
    way: str,
    recording_of: Callable[[str], Recording],
    expected: Callable[[str, str], dict[str, Update]],
    tmp_path: Path,
) -> None:
    with wide_casts():
        outcomes = one_step(recording_of(family), CASES[name], WAYS[way], tmp_path)
    apart = differences(outcomes, expected(family, name))
    assert all(each < FLOAT64 for each in apart), apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "world_size"),
    [(*model, ranks) for model in MODELS for ranks in RANKS],
)
def test_on_ranks_and_stages_the_step_is_the_reference_s(
    family: str,
    name: str,
    world_size: int,
    recording_of: Callable[[str], Recording],
    expected: Callable[[str, str], dict[str, Update]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    ranks = request.getfixturevalue(f"ranks{world_size}")
    check(name, SHARDED, ranks, recording_of(family), partial(expected, family), tmp_path)
