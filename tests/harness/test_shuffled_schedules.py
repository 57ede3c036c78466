"""An agent of many parts on real engines: in shuffled schedules its rows and their gradient are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.models.causal_lm import CausalLM
from rlflow.models.handle import ForwardPlan
from rlflow.models.packing import take
from rlflow.rollout import Completion, RolloutEngine, Sampling, TransformersEngine, VLLMEngine
from rlflow.rollout.engine import GenerationRequest
from rlflow.testing.derivative import wide_casts
from tests.harness.agents import UNREAD
from tests.harness.episodes import ScriptedConversations, played, running, tokenizer
from tests.rollout.trained import buckets, load, perturb, setup

SCHEDULES = 50
LEFT = 4 * 7  # answers that the four agents of a play do not wait for
ROWS = [{"question": f"{place}+1=", "waits": 0.05} for place in range(2)]

pytestmark = pytest.mark.slow


def trained_engine(engine: RolloutEngine, policy: Path) -> RolloutEngine:
    engine, model = setup(engine, policy), load(policy)
    perturb(model, 0, scale=0.1)
    engine.update_weights(buckets(model), version=0)
    return engine


def plays(engine: RolloutEngine, times: int) -> list[ScriptedConversations]:
    with running() as runner:
        return [
            played("toils", engine, ROWS, n=2, runner=runner, max_concurrent=4, timeout_s=600) for _ in range(times)
        ]


def undelivered(play: ScriptedConversations) -> int:
    """Answers for which nobody waited. On a busy machine an agent may leave before its request is read, or too late."""
    assert play.times.episodes is not None
    return play.times.episodes.undelivered


@pytest.mark.parametrize(
    ("make", "apart"),
    [(lambda: VLLMEngine(kv_cache_gib=0.25, max_num_seqs=64), 0.0), (TransformersEngine, 1e-4)],
    ids=["vllm", "transformers"],
)
def test_shuffled_schedules_give_equal_rows(make: Callable[[], RolloutEngine], apart: float, policy: Path) -> None:
    with closing(trained_engine(make(), policy)) as engine:
        every = plays(engine, SCHEDULES)
    assert all(each.times.episodes is not None and each.times.episodes.refused == 0 for each in every)
    first, *others = (each for each in every if undelivered(each) == LEFT)
    assert len(others) > SCHEDULES / 2
    # Three equal calls, two forks and what follows a retry begin with one call; two sub-agents have a row before their
    # summary and one after it; and there is the last summary.
    assert [row[7] for row in first.rows] == list(range(3 + 2 + 1 + 2 * 2 + 1)) * 4
    for start in range(0, 44, 11):  # the reward is how many tokens an agent received
        rows = first.rows[start : start + 11]
        assert {row[5][-1] for row in rows} == {float(sum(sum(row[3]) for row in rows))}
    for other in others:
        assert [row[:-1] for row in other.rows] == [row[:-1] for row in first.rows]
        for one, of_first in zip(other.rows, first.rows, strict=True):
            assert one[-1] == pytest.approx(of_first[-1], abs=apart, rel=0)


class Recorded(TransformersEngine):
    """Records what it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def alone(self) -> Iterator[ScriptedConversations]:
        """Plays; each has the tokens read and written in its `turns`."""
        for _ in range(20):
            self.turns.clear()
            yield from plays(self, 1)

    def step(self, new: Mapping[int, GenerationRequest], sampling: Sampling, version: int) -> dict[int, Completion]:
        ended = super().step(new, sampling, version)
        self.turns += [(tuple(new[number].prompt), each.token_ids) for number, each in ended.items()]
        return ended


def test_the_gradient_of_the_rows_is_that_of_each_received_call_alone_in_float64(policy: Path) -> None:
    """Rows are packed with shared prefixes; the reference reads what the engine read in each call, and no tree."""
    engine = Recorded()
    with closing(trained_engine(engine, policy)):
        made = next(made for made in engine.alone() if undelivered(made) == LEFT)
    calls = [(read, received(read, wrote)) for read, wrote in engine.turns if UNREAD not in text(read)]
    assert sum(len(wrote) for _, wrote in calls) == int(made.rollout.loss_mask.sum()) > 200
    with wide_casts():
        plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
        for read, wrote in calls:
            logits = plain(torch.tensor([[*read, *wrote]])).logits[0, len(read) - 1 : -1]
            logits.log_softmax(-1).gather(1, torch.tensor(wrote)[:, None]).sum().backward()
        expected = {name: each.grad for name, each in plain.named_parameters()}
        for budget in (100_000, 300):
            model = CausalLM(str(policy))
            network: Any = model.load(policy, torch.float64, torch.device("cpu"))
            model.attach(network, ForwardPlan(budget))
            with model.training():
                for part in model.plan.micro_batches(made.rollout):
                    (model.logprobs(take(made.rollout, part)) * made.rollout.loss_mask[part]).sum().backward()
            found = {name.removeprefix("model."): each.grad for name, each in network.named_parameters()}
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                apart = (gradient - expected[name]).abs().max() / expected[name].abs().max()
                assert apart < 1e-12, (name, float(apart))


def text(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids)))


def received(read: Sequence[int], wrote: tuple[int, ...]) -> tuple[int, ...]:
    """The delivered part of a turn: a fork asks for the text before `5`, and its token is the last."""
    asked = text(read).rpartition("<|im_start|>user\n")[2]
    stops = asked.startswith(("left", "right")) and ord("5") in wrote
    return wrote[: wrote.index(ord("5")) + 1] if stops else wrote
