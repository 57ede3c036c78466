"""One step of models that read pictures equals its float64 reference, however it is run, tower and critic included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlflow.testing.derivative import wide_casts
from tests.exactness.cases import CASES, Case, truth
from tests.exactness.step import one_step
from tests.exactness.step_record import BEHIND_PICTURE, PROMPTS, Recording, record
from tests.exactness.step_settings import LARGE, SMALL, Setting
from tests.exactness.test_algorithms import FLOAT32, FLOAT64, differences
from tests.families.towers import noise, write_tower
from tests.reference.update import Update
from tests.slow import slow_but

# Positions along the line and squares, positions in three dimensions, and the same with layers that carry a state.
FAMILIES = ("idefics3", "qwen3_vl", "qwen3_5")
ALGORITHMS = ("GRPO", "PPO", "DPO", "SFT", "RewardModelTraining")
MODELS = [(family, name) for family in FAMILIES for name in ALGORITHMS]
ONE, OTHER, LARGER = noise(1, 84, 56), noise(2, 84, 56), noise(3, 56, 112)
SHOWN = [[ONE], [OTHER], [LARGER, ONE], [], [LARGER], *[[]] * (PROMPTS - 5)]  # two prompts have pictures of one size
BARE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ PLACE + BEHIND if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)

WAYS = {
    "packed": Setting(None, LARGE, precision="fp64"),
    "few rows": Setting(None, SMALL, precision="fp64", seed=1),
    "padded": Setting(None, LARGE, packing=False, precision="fp64"),
    "checkpointed": Setting(None, LARGE, precision="fp64", checkpointing=True),
}
ZERO2 = Setting(2, SMALL, balance="off", checkpointing=True)
ZERO3 = Setting(3, SMALL, seed=1, checkpointing=True)
FSDP = Setting("fsdp", LARGE, seed=1)
SHARDED = {1: [ZERO2], 2: [ZERO2, ZERO3, FSDP], 4: [ZERO3, FSDP]}  # by the number of ranks


def case_of(name: str) -> Case:
    """An algorithm's case, whose dataset has a column of pictures."""
    return replace(CASES[name], columns={**CASES[name].columns, "images": "images"})


def write(family: str, folder: Path, seed: int) -> Path:
    """Write the family's model, with a chat template that writes texts and places of pictures alone."""
    write_tower(family, folder, seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    place = "<image>" if family == "idefics3" else "<|image_pad|>"
    tokenizer.chat_template = BARE.replace("PLACE", repr(place)).replace("BEHIND", repr(BEHIND_PICTURE))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recording_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """The recording of a step of a family's model."""

    def recorded(family: str) -> Recording:
        with wide_casts():
            return record(tmp_path_factory.mktemp(family), partial(write, family), pictures=SHOWN)

    return cache(recorded)


@pytest.fixture(scope="module")
def expected(recording_of: Callable[[str], Recording]) -> Callable[[str, str], dict[str, Update]]:
    """The reference's updates of a family's model in a case, by role."""

    @cache
    def of_case(family: str, name: str) -> dict[str, Update]:
        with wide_casts():
            return truth(case_of(name), recording_of(family))

    return of_case


@pytest.mark.parametrize(
    ("family", "name", "way"),
    slow_but([("qwen3_vl", "PPO", "packed")], [(*model, way) for model in MODELS for way in WAYS]),
)
def test_in_float64_the_step_with_pictures_is_the_reference_s(
    family: str,
    name: str,
    way: str,
    recording_of: Callable[[str], Recording],
    expected: Callable[[str, str], dict[str, Update]],
    tmp_path: Path,
) -> None:
    with wide_casts():
        outcomes = one_step(recording_of(family), case_of(name), WAYS[way], tmp_path)
    apart = differences(outcomes, expected(family, name))
    assert all(each < FLOAT64 for each in apart), apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "world_size"),
    [(*model, ranks) for ranks in SHARDED for model in MODELS],
)
def test_on_ranks_and_stages_the_step_with_pictures_is_the_reference_s(
    family: str,
    name: str,
    world_size: int,
    recording_of: Callable[[str], Recording],
    expected: Callable[[str, str], dict[str, Update]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    ranks, updates = request.getfixturevalue(f"ranks{world_size}"), expected(family, name)
    for number, setting in enumerate(SHARDED[world_size]):
        given = recording_of(family), case_of(name), setting, tmp_path / str(number)
        for outcomes in ranks.run(one_step, *given, timeout_s=240):
            apart = differences(outcomes, updates)
            assert all(each <= FLOAT32 for each in apart), (setting, apart)
