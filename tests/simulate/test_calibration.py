"""Constants found again from the seconds that they make, and processes that share a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.commands.simulate import read_simulate
from rlflow.errors import UserError
from rlflow.memory.workload import Workload
from rlflow.simulate.calibration import STEP, as_yaml, calibrated
from rlflow.simulate.designs import node_seconds, works
from rlflow.simulate.hardware import PRESETS, Hardware, read_hardware
from rlflow.simulate.simulation import Simulation

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart_grpo.yaml")
BARE = Hardware(1e11, 8e9, 1e10, 1e9, 1e9, 1, memory_efficiency=1.0, link_efficiency=1.0, decode_overhead=0.0)
TRUE = replace(
    BARE,
    train_efficiency=0.25,
    forward_efficiency=0.5,
    decode_overhead=3e-3,
    row_seconds=2e-6,
    micro_batch_seconds=4e-3,
    update_seconds=2e-2,
    response_seconds=3e-4,
    sync_seconds=2e-2,
    step_seconds=1e-2,
)


def workload(prompts: int) -> Workload:
    """The quickstart's step on one rank, with a forward pass for old logprobs."""
    sizes = [f"--data.prompts_per_step={prompts}", f"--module.actor.samples_per_update={2 * prompts}"]
    settings = ["--trainer.devices=1", "--module.actor.model=tiny", "--module.anchor=old", *sizes, "--scaling=strong"]
    simulation = read_simulate(["--config", QUICKSTART, *settings])
    return replace(simulation, hardware=BARE).predicted.workload


def test_the_constants_that_made_the_seconds_of_one_rank_are_found_again() -> None:
    steps = []
    for prompts in (256, 16):  # so few responses that the longest counts, and not how many there are
        load = workload(prompts)
        seconds = node_seconds(works(load, TRUE, "rlflow"))
        steps.append((load, {**seconds, STEP: sum(seconds.values())}))
    found = calibrated(replace(BARE, train_efficiency=1.0, forward_efficiency=1.0), steps)
    for name in ("train_efficiency", "forward_efficiency", "decode_overhead", "row_seconds", "micro_batch_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    for name in ("update_seconds", "response_seconds", "sync_seconds", "step_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name


def test_a_constant_is_never_negative() -> None:
    # Four times the rows take five times as long: no fixed cost above 0 explains it, so all of it is the rate.
    steps = []
    for prompts, factor in ((256, 1.25), (64, 1.0)):
        load = workload(prompts)
        bare = replace(TRUE, micro_batch_seconds=0.0, update_seconds=0.0)
        seconds = node_seconds(works(load, bare, "rlflow"))
        seconds = {name: value * factor for name, value in seconds.items()}
        steps.append((load, {**seconds, STEP: sum(seconds.values())}))
    found = calibrated(replace(BARE, train_efficiency=1.0, forward_efficiency=1.0), steps)
    assert found.update_seconds == 0
    assert 0.25 / 1.25 < found.train_efficiency < 0.25


def test_written_constants_of_a_machine_are_read_back_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(as_yaml(TRUE, {2: 1.5, 4: 3.0}))
    assert read_hardware(str(tmp_path / "mine.yaml")) == replace(TRUE, sharing={2: 1.5, 4: 3.0})


def test_processes_that_share_a_machine_compute_slower_in_proportion() -> None:
    machine = replace(TRUE, gpus_per_node=4, sharing={2: 1.5, 4: 3.0})
    # 3 lies halfway between 2 and 4; 8 ranks are on two machines of 4.
    for ranks, factor in ((1, 1.0), (2, 1.5), (3, 2.25), (4, 3.0), (8, 3.0)):
        shared = machine.computing_on(ranks)
        assert shared.peak_flops == pytest.approx(1e11 / factor)
        assert shared.update_seconds == pytest.approx(2e-2 * factor)
        assert shared.node_bandwidth == machine.node_bandwidth


def test_gpus_share_nothing() -> None:
    assert PRESETS["h100"].computing_on(8) == PRESETS["h100"]


def test_a_step_of_two_ranks_that_share_one_core_takes_as_long_as_that_of_one() -> None:
    # Twice the work on half the speed; what differs is what two ranks have to tell each other, and rows by chance.
    one = simulation(1, {}).predicted.timelines["rlflow"].seconds
    two = simulation(2, {2: 2.0}).predicted.timelines["rlflow"].seconds
    assert two == pytest.approx(one, rel=0.15)
    assert simulation(2, {}).predicted.timelines["rlflow"].seconds == pytest.approx(one / 2, rel=0.15)


def simulation(ranks: int, sharing: dict[int, float]) -> Simulation:
    settings = ["--module.actor.model=tiny", "--scaling=strong"]
    machine = replace(TRUE, gpus_per_node=ranks, sharing=sharing)
    return replace(read_simulate(["--config", QUICKSTART, *settings]), hardware=machine)


@pytest.mark.parametrize("sharing", ["half", "{two: 1.5}"])
def test_a_sharing_that_is_not_a_table_is_refused(sharing: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"like: h100\nsharing: {sharing}\n")
    with pytest.raises(UserError, match='holds no hardware: Parser key "sharing"'):
        read_hardware(str(tmp_path / "mine.yaml"))
