"""`episode-mean` in whole runs: the loss and the gradient are those of episodes, however these are divided into rows.

The references read no masks, spaces or paths of the run: they know which tokens of which episode are learnt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlflow import CausalLM, PerSample, PerToken, RLModule, Rollout, node
from rlflow.algorithms import DPO
from rlflow.context.generation import GenerationHistory
from rlflow.controller.nodes import new_rows
from rlflow.dag.node import Node
from rlflow.data.prompts import PromptData
from rlflow.databuffer.rows import RowSpace
from rlflow.strategies import FSDPStrategy, SingleProcess
from rlflow.testing.derivative import wide_casts
from rlflow.types import NewRows, Ragged, RowPath, WithDatasetRows
from rlflow.values.layout import Layout
from tests.algorithms.test_advantages import rows_of_agents
from tests.controller.runs import SGD, Fit, answers, failing_fit, fit
from tests.controller.test_continued import PROMPTS, TRUNKS, Branching, WithinOneNode, loss_of, run, worth
from tests.controller.test_ranks import FLOAT32, difference
from tests.data.list_source import Listed
from tests.ranks import RankPool
from tests.slow import slow_but

LR = 0.1


class Row(NamedTuple):
    """Tokens of a row after its prompt, and of each whether it is learnt in this row."""

    tokens: list[int]
    learnt: list[bool]


def episode(seed: int) -> tuple[list[int], list[bool]]:
    """Tokens after the prompt, three turns of the policy among them, and which tokens it wrote."""
    draws = torch.Generator().manual_seed(seed)
    turns = torch.randint(1, 9, (6,), generator=draws).tolist()  # every second one is of an environment
    tokens = torch.randint(60, 90, (sum(turns),), generator=draws).tolist()
    return tokens, [number % 2 == 0 for number, turn in enumerate(turns) for _ in range(turn)]


def as_one_row(tokens: list[int], wrote: list[bool]) -> list[Row]:
    return [Row(tokens, wrote)]


def as_a_row_for_each_turn(tokens: list[int], wrote: list[bool]) -> list[Row]:
    """Each row reads all that came before its turn; the last is the longest, and comes first."""
    ends = [i + 1 for i, by in enumerate(wrote) if by and not (i + 1 < len(wrote) and wrote[i + 1])]
    rows, start = [], 0
    for end in ends:
        rows.append(Row(tokens[:end], [by and start <= i for i, by in enumerate(wrote[:end])]))
        start = end
    return rows[::-1]


def as_one_or_three(tokens: list[int], wrote: list[bool]) -> list[Row]:
    return (as_one_row if len(tokens) % 2 else as_a_row_for_each_turn)(tokens, wrote)


DIVISIONS = {each.__name__: each for each in (as_one_row, as_a_row_for_each_turn, as_one_or_three)}


class Asked(WithDatasetRows, Protocol):
    """The fields of the batch that the episodes are made from."""

    prompt_ids: Ragged
    group: PerSample


class Told(RLModule):
    """Learns episodes that its rows of the dataset name, the sign of whose loss is the parity of their number."""

    max_response_length = 60
    loss_aggregation = "episode-mean"

    def __init__(self, model: Path, division: str, samples_per_update: int | None = None) -> None:
        self.model, self.division, self.samples_per_update = str(model), division, samples_per_update
        self.record: list[int] = []  # the episode of each row that this rank trains

    def configure_models(self) -> None:
        self.actor = CausalLM(self.model, optimizer=SGD, samples_per_update=self.samples_per_update)

    @node
    def told(self, batch: Asked) -> NewRows[Rollout]:
        numbers, rows, branch, index = [], [], [], []
        for place, row in enumerate(batch.rows):
            for number in row["episodes"]:
                made = DIVISIONS[self.division](*episode(number))
                index += [(place, sum(of == place for of, _ in index) + i) for i in range(len(made))]
                rows += made
                branch += range(len(made))
                numbers += [number] * len(made)
        places = torch.tensor([place for place, _ in index], dtype=torch.int64)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        width = int(lengths.max())
        ids, mask = (
            torch.tensor([[*each, *[0] * (width - len(each))] for each in column]) for column in zip(*rows, strict=True)
        )
        none = torch.zeros(len(rows), width)
        return Rollout(
            prompt_ids=batch.prompt_ids.take(places),
            response_ids=ids,
            loss_mask=mask.bool(),
            lengths=lengths,
            logprobs=none,
            finished=torch.ones(len(rows), dtype=torch.bool),
            path=RowPath(
                torch.stack([batch.group[places], torch.tensor([i for _, i in index])], dim=1),
                ("batch", "told"),
            ),
            version=torch.tensor(numbers),  # with which the loss weighs a row
            versions=none.int(),
            ended=torch.zeros_like(lengths),
            branch=torch.tensor(branch),
            texts=[""] * len(rows),
            rows=[batch.rows[place] for place in places.tolist()],
        )

    @node(role="actor", type="train")
    def actor_loss(self, told: Rollout) -> PerToken:
        self.record += told.version.tolist()
        return -(1 - 2 * (told.version % 2))[:, None] * self.actor.logprobs(told)


EPISODES = ([1, 2, 3, 4, 5, 6], [7], [8])  # of three prompts


def told_run(model: Path, folder: Path, division: str, strategy: Any, samples_per_update: int | None = None) -> Fit:
    rows = [{"question": question(i), "response": "", "episodes": of} for i, of in enumerate(EPISODES)]
    return Fit(Told(model, division, samples_per_update), PromptData(Listed(rows), None, 3), folder, strategy)


def question(i: int) -> str:
    return f"say {i} many words, {i}+{i}="


def tokenizer_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def gradient_of(model: Path) -> tuple[float, dict[str, Tensor]]:
    """The loss of all episodes and the weights after a step of SGD: the mean of each episode's mean, in float64."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), tokenizer_of(model)
    losses = []
    for i, of in enumerate(EPISODES):
        prompt = tokenizer.encode(question(i))
        for number in of:
            tokens, wrote = episode(number)
            ids = torch.tensor([[*prompt, *tokens]])
            logprobs = policy(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            of_tokens = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
            learnt = [-of_tokens[t] if number % 2 == 0 else of_tokens[t] for t, by in enumerate(wrote) if by]
            losses.append(sum(learnt) / len(learnt))
    loss = sum(losses) / len(losses)
    loss.backward()
    with torch.no_grad():
        after = {name: weight - LR * weight.grad for name, weight in policy.named_parameters()}
    return float(loss.detach()), after


@pytest.mark.parametrize(
    ("division", "shares"),
    slow_but(
        [("as_one_or_three", True)],
        [(division, shares) for division in DIVISIONS for shares in (True, False)],
    ),
)
def test_the_gradient_is_that_of_episodes_in_whatever_rows(
    division: str, shares: bool, policy: Path, tmp_path: Path
) -> None:
    strategy = partial(SingleProcess, "fp64", token_budget=50, share_prefixes=shares)
    with wide_casts():
        loss, after = gradient_of(policy)
        found = fit(told_run(policy, tmp_path / "run", division, strategy))
    assert found.steps[0]["actor/loss"] == pytest.approx(loss, rel=1e-12)
    assert difference(found.weights, after) < 1e-12


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
@pytest.mark.parametrize("shares", slow_but([True], [True, False]))
def test_ranks_that_divide_the_rows_of_an_episode_come_to_the_same(
    ranks: int, shares: bool, policy: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    loss, after = gradient_of(policy)
    strategy = partial(FSDPStrategy, token_budget=50, share_prefixes=shares)
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    results = pool.run(fit, told_run(policy, tmp_path / "run", "as_a_row_for_each_turn", strategy))
    assert {*results[0].record} & {*results[1].record}, "rows of an episode are on two ranks"
    for found in results:
        assert found.steps[0]["actor/loss"] == pytest.approx(loss, rel=1e-5)
        assert difference(found.weights, after) < FLOAT32


def test_an_update_is_of_whole_episodes(policy: Path, tmp_path: Path) -> None:
    """Eight episodes, two to an update: the same four updates, in whatever rows."""
    strategy = partial(SingleProcess, "fp64")
    with wide_casts():
        one, more = (
            fit(told_run(policy, tmp_path / division, division, strategy, samples_per_update=2))
            for division in ("as_one_row", "as_a_row_for_each_turn")
        )
    assert difference(more.weights, one.weights) < 1e-12
    assert more.steps[0]["actor/loss"] == pytest.approx(one.steps[0]["actor/loss"], rel=1e-12)


@pytest.mark.parametrize("tree", [Branching, WithinOneNode])
def test_a_tree_is_an_episode(tree: type[Branching], policy: Path, tmp_path: Path) -> None:
    """The rows below a trunk, whichever node made it; what they share has weight 2 where a node saw the trunk."""
    module = tree(policy)
    module.loss_aggregation = "episode-mean"
    found = fit(run(module, tmp_path / "run", max_steps=1))
    rows: dict[tuple[int, ...], Any] = {}
    for path, row in found.record[0].items():
        rows.setdefault(path[:2], {})[path] = row
    assert len(rows) == PROMPTS * TRUNKS
    if tree is WithinOneNode:
        expected = [loss_of(policy, of, weighs=lambda row, inherited: worth(row)) for of in rows.values()]
    else:
        expected = [loss_of(policy, of) for of in rows.values()]
    assert found.steps[0]["actor/loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("chosen", "begins"), [([0, 1, 2, 3, 4], [1, 0, 1, 0, 1]), ([1, 2], [1, 1]), ([1, 3, 5], [1, 1, 1])]
)
def test_rows_that_a_node_chooses_keep_their_episodes(chosen: list[int], begins: list[int]) -> None:
    """Of two agents with two rows each, below one prompt, and of two with one row, below another."""
    rows, here = replace(rows_of_agents(), branch=torch.tensor([0, 1, 0, 1, 0, 0])), Layout((0,), 1)
    prompts = RowSpace.of_shards("batch", here, [torch.tensor([[4, 7]] + [[1, 1]] * 4)])
    node = Node("chosen", (), None, "compute", Rollout, __file__, 1, grows=True)
    found = new_rows(node, rows.take(torch.tensor(chosen)), prompts, here, 0, GenerationHistory())
    assert found[-1].tolist() == begins


def test_pairs_are_of_no_episode(policy: Path, tmp_path: Path) -> None:
    module = DPO(str(policy))
    module.loss_aggregation = "episode-mean"
    data = answers([3, 4], 2)
    data.rejected = "question"
    error = failing_fit(Fit(module, data, tmp_path / "run")).error
    assert error == (
        "`loss_aggregation` is 'episode-mean', and `actor_loss` trains on pairs, which are of two responses and no"
        " episode; take another, such as 'token-mean': all of them average the loss over pairs"
    )
