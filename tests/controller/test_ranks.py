"""A run is the same at any number of ranks: its rows, its mini-batches, its weights."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlflow import CausalLM
from rlflow.rollout.transformers import TransformersEngine
from tests.controller.runs import (
    SGD,
    ZERO2,
    ZERO3,
    Fit,
    MovingGRPO,
    OddCharacters,
    Paired,
    RaggedReMax,
    RecordingSFT,
    Result,
    answers,
    fit,
    grpo,
    sums,
)
from tests.ranks import RankPool

FLOAT32 = 1e-6  # norm of the difference over the norm
LENGTHS = (3, 9, 1, 12, 5, 2, 7, 4)  # two steps of three rows; fewer rows than four ranks


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all tensors, over the norm of the expected ones."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return float((apart / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5)


@pytest.fixture(scope="module")
def sft(
    policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool, ranks4: RankPool
) -> dict[str, list[Result]]:
    """Two steps of two epochs in mini-batches of two rows, of each rank."""
    folder = tmp_path_factory.mktemp("sft")

    def run(name: str, strategy: object = None) -> Fit:
        given = {} if strategy is None else {"strategy": strategy}
        module = RecordingSFT(str(policy))
        return Fit(module, answers(LENGTHS, 3), folder / name, settings={"max_steps": 2}, **given)

    return {
        "1 rank": [fit(run("1"))],
        "2 ranks": ranks2.run(fit, run("2", ZERO2)),
        "4 ranks": ranks4.run(fit, run("4", ZERO2), timeout_s=200),
        "4 ranks, ZeRO 3": ranks4.run(fit, run("4-3", ZERO3), timeout_s=200),
    }


RANKS = ("2 ranks", "4 ranks", "4 ranks, ZeRO 3")


def test_every_number_of_ranks_draws_the_same_rows_in_the_same_order(sft: dict[str, list[Result]]) -> None:
    alone = sft["1 rank"][0].record["held"]
    assert [len(rows) for rows in alone] == [3, 3]
    assert len({row for rows in alone for row in rows}) == 6
    for ranks in RANKS:
        assert all(result.record["drawn"] == alone for result in sft[ranks])
        shards = [result.record["held"] for result in sft[ranks]]
        assert [[row for shard in shards for row in shard[step]] for step in range(2)] == alone


def test_every_number_of_ranks_trains_on_the_same_mini_batches(sft: dict[str, list[Result]]) -> None:
    alone = [sorted(rows) for rows in sft["1 rank"][0].record["trained"]]
    assert [len(rows) for rows in alone if len(rows) == 2] == [2] * 4  # of two steps and two epochs each
    assert len(alone) == 8
    for ranks in RANKS:
        by_rank = [result.record["trained"] for result in sft[ranks]]
        together = [sorted(chain(*rows)) for rows in zip(*by_rank, strict=True)]
        assert together == alone


def test_the_weights_are_the_same_for_every_number_of_ranks(sft: dict[str, list[Result]], policy: Path) -> None:
    expected = sft["1 rank"][0].weights
    start = AutoModelForCausalLM.from_pretrained(policy).requires_grad_(False)
    assert difference(expected, dict(start.named_parameters())) > 1e-3
    for ranks in RANKS:
        for result in sft[ranks]:
            assert difference(result.weights, expected) < FLOAT32


def test_the_metrics_are_the_same_for_every_number_of_ranks(sft: dict[str, list[Result]]) -> None:
    names = ("actor/loss", "actor/grad_norm")
    for ranks in RANKS:
        for found, expected in zip(sft[ranks][0].steps, sft["1 rank"][0].steps, strict=True):
            assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5)


@pytest.fixture(scope="module")
def one_prompt(policy: Path, tmp_path_factory: pytest.TempPathFactory, ranks2: RankPool) -> dict[int, list[Result]]:
    """Two steps of GRPO with one prompt and six samples of it, on one rank and on two."""
    folder = tmp_path_factory.mktemp("one_prompt")
    settings = {"max_steps": 2}

    def run(name: str, **given: object) -> Fit:
        module = MovingGRPO(CausalLM(str(policy), optimizer=SGD), OddCharacters(), group_size=6, max_response_length=12)
        return Fit(module, sums(4, prompts_per_step=1), folder / name, settings=settings, **given)  # type: ignore[arg-type]

    return {1: [fit(run("1"))], 2: ranks2.run(fit, run("2", strategy=ZERO2))}


def test_a_rank_without_a_prompt_takes_part_in_the_step(one_prompt: dict[int, list[Result]]) -> None:
    (alone,) = one_prompt[1]
    for result in one_prompt[2]:
        assert difference(result.weights, alone.weights) < FLOAT32
        assert result.steps[1]["reward/mean"] == alone.steps[1]["reward/mean"]
        assert result.steps[1]["rollout/tokens"] == alone.steps[1]["rollout/tokens"]


def test_the_bytes_logged_are_those_of_the_rows_that_moved(one_prompt: dict[int, list[Result]]) -> None:
    first, second = one_prompt[2]
    rows = {0: first.record, 1: second.record}
    assert all(rows.values())  # both train
    # Loading deals one prompt to the second of two shards: [0, 0) and [0, 1).
    moved = rows[0]
    # Ids of prompt and response take 8 bytes a token, its mask 1, its logprob and version 4; of a sample the length
    # takes 8, finished 1, the version 8, what it inherited 8, its temperature 8, why it ended 8, its seat 8, its branch
    # 8 and the advantage 4; who they are is known, and of turns, which none has, nothing is sent.
    expected = sum(8 * prompt + (8 + 1 + 4 + 4) * response + 8 + 1 + 6 * 8 + 4 for prompt, response in moved)
    for result in one_prompt[2]:
        assert result.steps[-1]["exchange/bytes"] == expected
        assert result.steps[-1]["exchange/busiest_rank_bytes"] == expected


def test_one_rank_exchanges_nothing(one_prompt: dict[int, list[Result]]) -> None:
    assert one_prompt[1][0].steps[0]["exchange/bytes"] == 0


def test_the_rows_of_an_engine_that_two_ranks_share_count_once(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    def run(name: str, **given: object) -> Fit:
        return Fit(grpo(policy), sums(6, prompts_per_step=3, held_out=3), tmp_path / name, **given)  # type: ignore[arg-type]

    alone = fit(run("alone"))
    for result in ranks2.run(fit, run("shared", strategy=ZERO2, engine=Paired())):
        for name in ("rollout/tokens", "rollout/length", "rollout/truncated", "reward/mean"):
            assert result.steps[0][name] == alone.steps[0][name]
        assert result.summary["accuracy_after"] == alone.summary["accuracy_after"]
        assert result.steps[0]["sync/logprob_gap_max"] < 1e-5


def test_one_response_to_each_prompt_is_as_long_on_every_rank(policy: Path, tmp_path: Path, ranks2: RankPool) -> None:
    def run(name: str, **given: object) -> Fit:
        module = RaggedReMax(CausalLM(str(policy), optimizer=SGD), OddCharacters(), max_response_length=12)
        return Fit(module, sums(5, prompts_per_step=5), tmp_path / name, **given)  # type: ignore[arg-type]

    alone = fit(run("alone"))
    for name, engine in {"apart": TransformersEngine(), "shared": Paired()}.items():
        for result in ranks2.run(fit, run(name, strategy=ZERO2, engine=engine)):
            assert difference(result.weights, alone.weights) < FLOAT32
            for metric in ("greedy/logprobs", "greedy_reward/mean"):
                assert result.steps[0][metric] == pytest.approx(alone.steps[0][metric], rel=1e-6)


def test_the_most_bytes_held_are_counted_for_each_step_alone(policy: Path, tmp_path: Path) -> None:
    run = Fit(RecordingSFT(str(policy)), answers((9, 12, 1, 2), 2, shuffle=False), tmp_path, settings={"max_steps": 2})
    long, short = fit(run).steps
    assert 0 < short["exchange/held_bytes_max"] < long["exchange/held_bytes_max"]
