"""`self.log` with the arguments of Lightning's: numbers by hand, on ranks with 3, 1 and no rows.

`tests/callbacks/test_against_lightning.py` compares with Lightning itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow import Batch, CausalLM, PerToken, RLModule, UserError, node
from rlflow.algorithms import SFT
from rlflow.context.node_context import Running
from rlflow.data.prompts import PromptData
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.metrics import Metrics
from rlflow.run.prepare import read_graph
from rlflow.strategies import FSDPStrategy
from rlflow.values.layout import Layout
from tests.controller.runs import SGD, Fit, answers, failing_fit, fit
from tests.data.list_source import Listed
from tests.node_context import node_context
from tests.ranks import RankPool

ROWS = [[1.0, 2.0, 3.0], [10.0], []]  # of three ranks
BY_HAND = {  # of the four rows
    "mean": 4.0,
    "masked": 5.0,  # of 2, 3 and 10
    "sum": 16.0,
    "masked sum": 15.0,
    "max": 10.0,
    "min": 1.0,
    "masked min": 2.0,
    "tokens": (2 + 6 + 20) / 3,
    "of ranks": 4.0,  # 2 of three rows, and 10 of one
    "largest of ranks": 1.0,  # NaN on the rank without rows
    "alike": 7.0,
}


class Noting(RLModule):
    """Logs rows in each way."""

    @node
    def noted(self, batch: Batch) -> None:
        pass

    def log_all(self, x: Tensor) -> None:
        above, pairs = x > 1, torch.stack([x, 2 * x], dim=1)
        self.log("mean", x, sync_dist=True, on_step=True, on_epoch=False)
        self.log("masked", x, above, reduce_fx="avg")
        self.log("sum", x, reduce_fx="SUM")
        self.log_dict({"masked sum": x}, above, reduce_fx=torch.sum)
        self.log("max", x, reduce_fx="max")
        self.log("min", x, reduce_fx=torch.min)
        self.log("masked min", x, above, reduce_fx="min")
        self.log("none", x, x > 10, reduce_fx="max")
        self.log("tokens", pairs, torch.stack([x == 2, x > 2], dim=1))
        self.log("of ranks", x.mean())
        self.log("largest of ranks", x.mean() / x.mean(), reduce_fx="max")
        self.log("alike", 7)


def running(x: list[float]) -> tuple[Noting, Metrics]:
    """A module in a node that has these rows on this rank."""
    module, metrics, transport = Noting(), Metrics(), Transport()
    context, ids = node_context(transport), torch.arange(len(x)) + 10 * transport.rank
    module.attach(context)
    here = Layout(tuple(range(transport.world_size)), transport.world_size)
    space = RowSpace.gather("batch", transport, here, path=ids[:, None], lengths=ids, tokens=ids)
    context.running = Running(read_graph(module).nodes["noted"], space, here, 0, {}, metrics.of(0))
    return module, metrics


def logged(rows: list[list[float]]) -> dict[str, float]:
    x = rows[Transport().rank]
    module, metrics = running(x)
    module.log_all(torch.tensor(x))
    return metrics.reduce(0, Transport())


def test_each_row_counts_once_on_one_rank() -> None:
    assert logged([[x for of_rank in ROWS for x in of_rank]]) == BY_HAND


def test_each_row_counts_once_on_uneven_ranks(ranks3: RankPool) -> None:
    assert ranks3.run(logged, ROWS) == [BY_HAND] * 3


def of_one_rank() -> tuple[dict[str, float], set[str], set[str]]:
    """Numbers that depend on the rank; and a metric that the last rank alone logs."""
    rank = Transport().rank
    module, metrics = running(ROWS[rank])
    module.log("sized", float(rank), batch_size=rank)
    module.log("largest", torch.tensor([1.0, math.nan, 2.0][rank]), reduce_fx="max")
    module.log("smallest", torch.tensor([-1.0, -math.inf, 2.0][rank]), reduce_fx="min")
    if rank == 2:
        module.log("last", 3.0, batch_size=1, prog_bar=True, logger=False)
    return metrics.reduce(0, Transport()), metrics.on_bar(), metrics.off_loggers()


def test_ranks_agree_on_what_one_of_them_logs(ranks3: RankPool) -> None:
    for found, on_bar, off_loggers in ranks3.run(of_one_rank):
        assert math.isnan(found.pop("largest"))
        # 0 of no row, 1 of one and 2 of two
        assert found == {"sized": (1 + 2 + 2) / 3, "smallest": -math.inf, "last": 3.0}
        assert (on_bar, off_loggers) == ({"last"}, {"last"})


def of_two_kinds() -> str:
    module, metrics = running([1.0])
    module.log("x", torch.ones(1), reduce_fx=["sum", "max", "sum"][Transport().rank])
    with pytest.raises(UserError) as error:
        metrics.reduce(0, Transport())
    return str(error.value)


def test_ranks_that_log_a_name_in_two_ways_all_refuse_it(ranks3: RankPool) -> None:
    (said,) = {*ranks3.run(of_two_kinds)}
    assert said.startswith("`self.log` has 'x' with reduce_fx='max', prog_bar=False, logger=True, and with reduce_fx='")


class LogsInTraining(SFT):
    """Logs the mean length of each micro-batch; some ranks have micro-batches without rows."""

    @node(role="actor", type="train")
    def actor_loss(self, batch: Batch) -> PerToken:
        self.log("lengths", batch.lengths.double().mean())
        self.log("rows", torch.ones(len(batch.lengths)), reduce_fx="sum")
        return super().actor_loss(batch)


def test_a_micro_batch_counts_by_its_rows(policy: Path, tmp_path: Path, ranks3: RankPool) -> None:
    module = LogsInTraining(CausalLM(str(policy), optimizer=SGD))
    run = Fit(module, answers((2, 9, 1, 12), 4), tmp_path, partial(FSDPStrategy, token_budget=16))
    for result in ranks3.run(fit, run):
        # a row has its characters and the end of text
        assert (result.steps[0]["lengths"], result.steps[0]["rows"]) == ((3 + 10 + 2 + 13) / 4, 4.0)


class Twice(LogsInTraining):
    """Logs the same name in validation."""

    def validation_step(self, batch: Batch) -> None:
        self.log(self.name, batch.lengths.double())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lengths", "`self.log` has 'lengths' in `validation_step` and in a node; take two names"),
        ("actor/loss", "`self.log` has the name 'actor/loss' in `validation_step`, under which rlflow logs a metric"),
    ],
)
def test_a_name_of_a_node_is_not_one_of_validation(name: str, said: str, policy: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{i}=", "answer": "01"} for i in range(2)]
    data = PromptData(Listed(rows), Listed(rows), prompts_per_step=2, response="answer")
    module = Twice(CausalLM(str(policy), optimizer=SGD))
    module.name = name
    assert failing_fit(Fit(module, data, tmp_path)).error.startswith(said)


CLASHES: dict[str, Callable[[Noting, Metrics], Any]] = {
    "'mean', under which rlflow logs": lambda module, metrics: (
        metrics.of(0).number("mean", 1.0),
        module.log("mean", 1.0),
    ),
    "'other', under which rlflow logs": lambda module, metrics: (
        module.log("other", 1.0),
        metrics.of(0).sum("other", 1.0),
    ),
    "and with reduce_fx='sum'": lambda module, metrics: (module.log("x", 1), module.log("x", 1, reduce_fx="sum")),
    "prog_bar=True": lambda module, metrics: (module.log("x", 1), module.log("x", 1, prog_bar=True)),
}


@pytest.mark.parametrize("said", CLASHES)
def test_a_name_is_logged_in_one_way(said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        CLASHES[said](*running([1.0]))
    assert "\n" not in str(error.value)


REFUSED: dict[str, Callable[[RLModule], None]] = {
    "`reduce_fx=None`; give mean, sum, max or min": lambda module: module.log("x", 1, reduce_fx=None),  # type: ignore[arg-type]
    "a dict; give a number, or a tensor": lambda module: module.log("x", {"a": 1}),  # type: ignore[arg-type]
    "True as its mask; write what it is, such as `prog_bar=True`": lambda module: module.log("x", 1, True),  # type: ignore[arg-type]
    "`reduce_fx='median'`; give mean, sum, max or min": lambda module: module.log("x", 1, reduce_fx="median"),
    "`reduce_fx=<built-in": lambda module: module.log("x", 1, reduce_fx=torch.std),
    "`sync_dist=False`, and a metric is over": lambda module: module.log("x", 1, sync_dist=False),
    "`rank_zero_only=True`, and a metric is over": lambda module: module.log("x", 1, rank_zero_only=True),
    "`enable_graph`, and what is logged": lambda module: module.log("x", 1, enable_graph=True),
    "`sync_dist_group`, and a metric is": lambda module: module.log("x", 1, sync_dist_group=1),
    "`add_dataloader_idx`, and a name is": lambda module: module.log("x", 1, add_dataloader_idx=False),
    "`metric_attribute`, and a torchmetrics.Metric": lambda module: module.log("x", 1, metric_attribute="y"),
    "`batch_size` with [1], whose entries": lambda module: module.log("x", torch.ones(1), batch_size=1),
    "`batch_size`, which weights a mean": lambda module: module.log("x", 1, batch_size=1, reduce_fx="sum"),
    "`batch_size=-1`; give the number": lambda module: module.log("x", 1, batch_size=-1),
    "`on_step=False`, and a metric is logged in each": lambda module: module.log("x", 1, on_step=False),
    "`on_epoch=True`, and a metric is of its step": lambda module: module.log("x", 1, on_epoch=True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_an_argument_without_a_meaning_is_refused(said: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"log('x') was given {said}")) as error:
        REFUSED[said](running([1.0])[0])
    assert "\n" not in str(error.value)


def test_the_name_of_a_step_s_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"log\('step'\) was given the name under which each step's number"):
        running([1.0])[0].log("step", 1.0)


def test_in_validation_a_metric_is_of_all_rows() -> None:
    module, metrics = running([1.0])
    context = module._context
    assert context is not None
    assert context.running is not None
    context.running.validates = True
    module.log("x", 1, on_step=False, on_epoch=True)
    assert metrics.reduce(0, Transport()) == {"x": 1.0}
    for argument in ("on_step=True", "on_epoch=False"):
        name, _, value = argument.partition("=")
        with pytest.raises(UserError, match=f"was given `{argument}`, and a metric is over all held-out rows"):
            module.log("x", 1, **{name: value == "True"})  # type: ignore[arg-type]
