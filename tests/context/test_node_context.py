"""Requests of a node to all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow import Batch, CausalLM, PerSample, Rollout, UserError, node
from rlflow.algorithms import GRPO
from rlflow.context.node_context import NodeContext, Running
from rlflow.dag.graph import Graph
from rlflow.data.prompts import PromptData
from rlflow.databuffer.rows import RowSpace
from rlflow.databuffer.transport import Transport
from rlflow.known_answers import numbers_of
from rlflow.metrics import Metrics, StepMetrics
from rlflow.types import WithDatasetRows
from rlflow.values.layout import Layout
from rlflow.values.ragged import Ragged
from tests.controller.runs import ZERO2, Fit, OddCharacters, Paired, fit
from tests.data.list_source import Listed
from tests.node_context import node_context
from tests.ranks import RankPool

KNOWN = numbers_of("global_whiten")
SHARES = (0.0, 0.25, 0.5, 1.0)
X = [1.0, 1.0, -1.0, -3.0]  # of the prompts; the first two lie on rank 0
MEAN, POPULATION, UNBIASED = -0.5, KNOWN["population_std"], KNOWN["unbiased_std"]


class Asks(GRPO):
    """Asks in a node without a role, and in a rollout node, where peers may hold copies."""

    record: dict[str, Any]

    @node
    def x(self, batch: WithDatasetRows) -> PerSample:
        x = torch.tensor([row["x"] for row in batch.rows])
        self.record = {"node": self._ask(x)}
        return x

    @node(role="rollout")
    def rollout(self, batch: Batch, x: PerSample) -> Rollout:
        self.record["rollout"] = self._ask(x)
        return self.generate(batch, n=self.group_size)

    def _ask(self, x: PerSample) -> dict[str, list[float]]:
        masked = x[:, None].repeat(1, 2)  # [B, 2], whose second column shall not count
        mask = torch.tensor([[True, False]]).expand_as(masked)
        masked = masked.where(mask, 100.0)
        return {
            "held": x.tolist(),
            "mean": [self.mean(x).item(), self.mean(masked, mask).item()],
            "unbiased": self.whiten(x).tolist(),
            "population": self.whiten(x, unbiased=False).tolist(),
            "masked": self.whiten(masked, mask).flatten().tolist(),
            "quantiles": [self.quantile(x, SHARES).tolist(), self.quantile(masked, SHARES, mask).tolist()],
            "all_rows": self.all_rows(x).tolist(),
            "ragged": [row.tolist() for row in self.all_rows(Ragged.from_lists(_lists(x))).rows()],
        }


def _lists(x: PerSample) -> list[list[int]]:
    """For each number a row as long as it is far from 0, of the number."""
    return [[int(number)] * abs(int(number)) for number in x.tolist()]


@pytest.fixture(scope="module", params=["1 rank", "2 ranks", "2 ranks that share an engine"])
def asked(
    request: pytest.FixtureRequest, policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool
) -> list[dict[str, Any]]:
    """The answer that each rank got."""
    rows = [{"question": f"{i}=", "x": x} for i, x in enumerate(X)]
    data = PromptData(Listed(rows), None, prompts_per_step=len(X), shuffle=False)
    module = Asks(CausalLM(str(policy)), OddCharacters(), group_size=2, max_response_length=4)
    folder = tmp_path_factory.mktemp("asked")
    if request.param == "1 rank":
        return [fit(Fit(module, data, folder)).record]
    engine = {"engine": Paired()} if "share" in request.param else {}
    return [result.record for result in ranks2.run(fit, Fit(module, data, folder, ZERO2, **engine))]


@pytest.mark.parametrize("place", ["node", "rollout"])
class TestOverAllRows:
    def test_the_mean_is_that_of_all_rows(self, asked: list[dict[str, Any]], place: str) -> None:
        assert [rank[place]["mean"] for rank in asked] == [[MEAN, MEAN]] * len(asked)

    def test_whitening_gives_the_known_answers(self, asked: list[dict[str, Any]], place: str) -> None:
        unbiased, population = dict(zip(X, UNBIASED, strict=True)), dict(zip(X, POPULATION, strict=True))
        for rank in asked:
            here = rank[place]["held"]
            assert rank[place]["unbiased"] == pytest.approx([unbiased[x] for x in here], abs=1e-6)
            assert rank[place]["population"] == pytest.approx([population[x] for x in here], abs=1e-6)
            assert rank[place]["masked"][::2] == rank[place]["unbiased"]
            assert rank[place]["masked"][1::2] == [0.0] * len(here)

    def test_quantiles_are_those_of_all_rows(self, asked: list[dict[str, Any]], place: str) -> None:
        # of -3, -1, 1, 1: a quarter of the way from first to last is at -3 + 0.75 * 2, half of it at -1 + 0.5 * 2
        assert [rank[place]["quantiles"] for rank in asked] == [[[-3.0, -1.5, 0.0, 1.0]] * 2] * len(asked)

    def test_all_rows_are_in_the_order_drawn_on_every_rank(self, asked: list[dict[str, Any]], place: str) -> None:
        assert [rank[place]["all_rows"] for rank in asked] == [X] * len(asked)
        assert [rank[place]["ragged"] for rank in asked] == [_lists(torch.tensor(X))] * len(asked)


class AsksOfNaN(Asks):
    """Whitens with a NaN in the third row of the step."""

    @node
    def x(self, batch: WithDatasetRows) -> PerSample:
        x = torch.tensor([row["x"] for row in batch.rows])
        try:
            self.whiten(x.where(x != X[2], torch.nan))
        except UserError as error:
            self.record = {"error": str(error)}
        return x

    @node(role="rollout")
    def rollout(self, batch: Batch, x: PerSample) -> Rollout:
        return self.generate(batch, n=self.group_size)


def test_every_rank_names_the_row_that_is_nan_on_one(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    assert X.count(X[2]) == 1
    rows = [{"question": f"{i}=", "x": x} for i, x in enumerate(X)]
    data = PromptData(Listed(rows), None, prompts_per_step=len(X), shuffle=False)
    module = AsksOfNaN(CausalLM(str(policy)), OddCharacters(), group_size=2, max_response_length=4)
    errors = {result.record["error"] for result in ranks2.run(fit, Fit(module, data, tmp_path, ZERO2))}
    (error,) = errors
    assert error.startswith("row 2, one of 1, has an infinite or NaN entry")


def test_the_ranks_of_the_known_answers_hold_two_rows_each(asked: list[dict[str, Any]]) -> None:
    assert [rank["node"]["held"] for rank in asked] == ([X] if len(asked) == 1 else [X[:2], X[2:]])


def _quantile_of_tokens(bounds: list[int]) -> float:
    """Each rank has some of the tokens, one none."""
    transport, rank = Transport(), dist.get_rank()
    context = _context(transport, Metrics().of(0), Layout(tuple(range(dist.get_world_size())), dist.get_world_size()))
    module = Asks(CausalLM("tiny"), OddCharacters())
    module.attach(context)
    here = tokens()[bounds[rank] : bounds[rank + 1]]
    return module.quantile(here[None], 0.8, torch.ones_like(here, dtype=torch.bool)[None]).item()


def tokens() -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("world_size", "bounds"), [(2, [0, 4999, 5000]), (4, [0, 700, 700, 2600, 5000])])
def test_a_quantile_of_many_tokens_on_many_ranks_is_torch_s_to_the_bit(
    world_size: int, bounds: list[int], request: pytest.FixtureRequest
) -> None:
    found = request.getfixturevalue(f"ranks{world_size}").run(_quantile_of_tokens, bounds)
    assert found == [torch.quantile(tokens().double(), 0.8).item()] * world_size


def _context(transport: Transport, metrics: StepMetrics, layout: Layout) -> NodeContext:
    """In a node of two rows."""
    context = node_context(transport, torch.float32)
    ids = torch.arange(2) + 2 * layout.shard(transport.rank)
    space = RowSpace.gather("batch", transport, layout, path=ids[:, None], lengths=ids, tokens=ids)
    module = Asks(CausalLM("tiny"), OddCharacters())
    module.configure_models()
    rollout = Graph.read(module, roles=("actor", "reference")).nodes["rollout"]
    context.running = Running(rollout, space, layout, 0, {}, metrics)
    return context


def _log_on_peers(logged: list[float]) -> dict[str, float]:
    """Both ranks hold one shard; each logs its own number for its two rows."""
    transport, metrics = Transport(), Metrics()
    context = _context(transport, metrics.of(0), Layout((0, 1), 1))
    number = logged[dist.get_rank()]
    context.log("plain", torch.full((2,), number), None)
    context.log("masked", torch.tensor([[number, float("nan")]]), torch.tensor([[True, False]]))
    return metrics.reduce(0, transport)


def test_of_peers_that_hold_the_same_rows_one_logs(ranks2: RankPool) -> None:
    assert ranks2.run(_log_on_peers, [3.0, 100.0]) == [{"masked": 3.0, "plain": 3.0}] * 2
