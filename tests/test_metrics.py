"""One number for each metric, over all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from rlflow.databuffer.transport import Transport
from rlflow.metrics import Metrics, straggler
from tests.ranks import RankPool


def _reduced() -> tuple[list[tuple[str, float]], dict[str, float]]:
    """A step's metrics as they come out, and those of a step in which nothing was logged."""
    rank, all_metrics = dist.get_rank(), Metrics()
    metrics = all_metrics.of(4)
    metrics.mean("mean", torch.tensor([1.0, 30.0][rank]), torch.tensor([1, 3][rank]))
    metrics.mean("mean", torch.tensor(1.0), torch.tensor(1))
    metrics.mean("empty", torch.tensor(0.0), torch.tensor(0))
    metrics.number("a/number", 7.0)
    for value in (1.0, 2.0):
        metrics.sum("sum", value + rank)
        metrics.largest("largest", value + rank)
        metrics.seconds("seconds", value + rank)
    if rank == 1:
        metrics.largest("one/rank", -3.0)
    transport = Transport()
    return list(all_metrics.reduce(4, transport).items()), all_metrics.reduce(4, transport)


def test_every_rank_has_the_metrics_over_all_of_them_sorted_by_name(ranks2: RankPool) -> None:
    expected = [
        ("a/number", 7.0),
        ("largest", 3.0),
        ("mean", (1 + 1 + 30 + 1) / (1 + 1 + 3 + 1)),  # sum over count, not the mean of the ranks' means
        ("one/rank", -3.0),
        ("seconds", 2.0 + 3.0),  # of rank 1, which took longer in all
        ("sum", 1.0 + 2.0 + 2.0 + 3.0),
    ]
    assert [reduced for reduced, _ in ranks2.run(_reduced)] == [expected] * 2


def test_seconds_of_a_step_in_progress_continue_where_it_is_resumed(ranks1: RankPool) -> None:
    assert ranks1.run(_continued) == [{"peak": 5.0, "time/node": 2.0 + 3.0}]


def _continued() -> dict[str, float]:
    """A step in progress when a checkpoint was written, continued by another process."""
    before, after = Metrics(), Metrics()
    before.of(4).seconds("time/node", 2.0)
    before.of(4).largest("peak", 5.0)
    after.load_state_dict(before.state_dict())
    after.of(4).seconds("time/node", 3.0)
    after.of(4).largest("peak", 4.0)
    return after.reduce(4, Transport())


def test_a_reduction_starts_afresh(ranks2: RankPool) -> None:
    assert [after for _, after in ranks2.run(_reduced)] == [{}, {}]


def _names_one_after_another() -> list[dict[str, float]]:
    """Metrics of steps in which now one rank, now the other logs something new."""
    rank, metrics, transport = dist.get_rank(), Metrics(), Transport()
    steps = []
    for step in range(3):
        metrics.of(step).sum("always", 1.0)
        if step == 1 + rank:
            metrics.of(step).largest(f"of/rank{rank}", -2.0)
        steps.append(metrics.reduce(step, transport))
    return steps


def test_what_is_logged_of_one_step_is_not_in_the_metrics_of_another() -> None:
    metrics, transport = Metrics(), Transport()
    first, second = metrics.of(0), metrics.of(1)
    second.sum("sum", 5.0)
    first.sum("sum", 2.0)
    assert (metrics.reduce(0, transport), metrics.reduce(1, transport)) == ({"sum": 2.0}, {"sum": 5.0})


def test_a_name_that_one_rank_logs_for_the_first_time_is_learned_by_all(ranks2: RankPool) -> None:
    expected = [{"always": 2.0}, {"always": 2.0, "of/rank0": -2.0}, {"always": 2.0, "of/rank1": -2.0}]
    assert ranks2.run(_names_one_after_another) == [expected] * 2


def _collectives_of_a_step() -> list[list[str]]:
    """The collectives of this rank in each of three steps of the same names."""
    transport, waits = Transport(), _Waits()
    transport.watch = waits
    metrics, found = Metrics(), []
    for step in range(3):
        metrics.of(step).sum("sum", 1.0)
        metrics.of(step).mean("mean", 1.0, 1.0)
        waits.names = []
        metrics.reduce(step, transport)
        found.append(waits.names)
    return found


class _Waits:
    """Notes collectives by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def wait(self, name: str, start: float, end: float) -> None:
        self.names.append(name)

    def flight(self, name: str, start: float, end: float) -> None:
        raise AssertionError(name)


def test_metrics_are_two_reductions_once_their_names_are_known(ranks2: RankPool) -> None:
    # at first: one that says that names are new, two of the names and their lengths, and the two of the numbers
    reduced = ["all_reduce"] * 2
    assert ranks2.run(_collectives_of_a_step) == [[["all_reduce", "gather_bytes", *reduced], reduced, reduced]] * 2


# Added one after the other, 0.1, 0.2 and 0.3 give 0.6000000000000001 or 0.6; 1e16 swallows 1 twice, or keeps 2.
UNEVEN = [0.1, 0.2, 0.3], [1.0, 1.0, 1e16], [-1.5, math.inf, 2.0]


def _totals_of(order: tuple[int, ...]) -> list[float]:
    """Totals if rank `r` logs the values at `order[r]`, and a number of other names that differs."""
    transport, metrics = Transport(), Metrics()
    for name, values in enumerate(UNEVEN):
        metrics.of(0).sum(f"sum/{name}", values[order[transport.rank]])
    for name in range(order[0]):
        metrics.of(0).number(f"other/{name}", 1.0)
    reduced = metrics.reduce(0, transport)
    return [reduced[f"sum/{name}"] for name in range(len(UNEVEN))]


def test_a_total_does_not_depend_on_the_order_in_which_ranks_add_theirs(ranks3: RankPool) -> None:
    found = [totals for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)) for totals in ranks3.run(_totals_of, order)]
    assert all(totals[:2] == [math.fsum(values) for values in UNEVEN[:2]] for totals in found)
    assert all(math.isnan(totals[2]) for totals in found)


def _worked_of_three() -> dict[str, float]:
    transport, metrics = Transport(), Metrics()
    return metrics.reduce(0, transport, worked=[2.0, 5.0, 1.0][transport.rank])


def test_every_rank_knows_the_straggler_of_all(ranks3: RankPool) -> None:
    assert ranks3.run(_worked_of_three) == [{"time/straggler_rank": 1.0, "time/straggler_share": 1.5}] * 3


def test_a_mean_takes_its_total_and_its_count_from_different_devices() -> None:
    metrics = Metrics().of(0)
    metrics.mean("mean", torch.tensor(1.0, device="meta"), torch.tensor(1.0))
    metrics.mean("mean", torch.tensor(1.0), torch.tensor(1.0, device="meta"))


def test_the_straggler_is_logged_with_its_time_above_the_median() -> None:
    assert straggler([2.0, 5.0, 1.0]) == {"time/straggler_rank": 1.0, "time/straggler_share": 1.5}
    assert straggler([2.0, 2.0]) == {"time/straggler_rank": 0.0, "time/straggler_share": 0.0}


def test_one_rank_holds_nobody_up() -> None:
    assert straggler([2.0]) == straggler([0.0, 0.0]) == {}
