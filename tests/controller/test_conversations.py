"""Conversations with an environment, in whole runs: the same tokens on any ranks, and the loss of what was sampled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow import Batch, CausalLM, Environment, Rollout, node
from rlflow.algorithms import GDPO, GRPO, TreeRL
from rlflow.commands.report import spans
from rlflow.errors import UserError
from rlflow.loggers.jsonl import read_samples
from rlflow.loggers.trace import read_events
from rlflow.rewards import CallableReward
from rlflow.rollout.conversation_loop import CONVERSATIONS
from rlflow.rollout.transformers import TransformersEngine
from rlflow.strategies import SingleProcess
from rlflow.trainer import Trainer
from tests.controller.answering import Meeting, Slow
from tests.controller.policies import paths_of
from tests.controller.runs import FSDP, SGD, Fit, Paired, Result, fit, sums
from tests.ranks import RankPool
from tests.worker_processes import workers

PROMPTS, GROUP = 4, 3
ANSWERING = "tests.controller.answering.Counting"


@dataclass(eq=False)
class Talking(GRPO):
    """Records its conversations, and the advantages of the last step."""

    record: list[dict[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    @node(role="rollout")
    def rollout(self, batch: Batch) -> Rollout:
        rollout = super().rollout(batch)
        rows = {}
        for row, path in enumerate(paths_of(rollout)):
            length = int(rollout.lengths[row])
            rows[path] = {
                "prompt": rollout.prompt_ids.rows()[row].tolist(),
                "response": rollout.response_ids[row, :length].tolist(),
                "mask": rollout.loss_mask[row, :length].tolist(),
                "logprobs": rollout.logprobs[row, :length].tolist(),
                "reward": float(rollout.returns[row].sum()),
                "turns": int(rollout.turns[row]),
                "messages": rollout.messages[row],
            }
        self.record.append(rows)
        return rollout


def talking(policy: Path, **settings: Any) -> Talking:
    environment = Environment(ANSWERING, max_turns=3, max_turn_length=6)
    given = {"environment": environment, "group_size": GROUP, "max_response_length": 90, **settings}
    return Talking(CausalLM(str(policy), optimizer=SGD), **given)


def run(module: Talking, folder: Path, strategy: Any = None, **settings: Any) -> Fit:
    data = sums(12, PROMPTS)
    data.chat_template, data.max_prompt_length = True, 120
    more = {} if strategy is None else {"strategy": strategy}
    return Fit(module, data, folder, settings={"max_steps": 2, **settings}, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture(scope="module")
def alone(policy: Path, folder: Path) -> Result:
    return fit(run(talking(policy), folder))


def said(rows: dict[tuple[int, ...], dict[str, Any]]) -> dict[tuple[int, ...], list[Any]]:
    """All but the logprobs, whose last bits depend on the other rows of a batch."""
    kept = ("prompt", "response", "mask", "reward", "turns", "messages")
    return {path: [row[name] for name in kept] for path, row in rows.items()}


def _fit_and_leave_no_worker(held: Fit) -> Result:
    result = fit(held)
    assert not workers()
    return result


def test_two_ranks_workers_and_a_shared_engine_hold_the_same_conversations(
    alone: Result, policy: Path, tmp_path: Path, ranks2: RankPool
) -> None:
    on_two = ranks2.run(fit, run(talking(policy), tmp_path / "two", FSDP))
    first = Environment(
        "tests.controller.answering.OfFirstRank", max_turns=3, max_turn_length=6, timeout_s=60, workers=2
    )
    one_engine = replace(run(talking(policy, environment=first), tmp_path / "one", FSDP, max_steps=1), engine=Paired())
    shared = ranks2.run(_fit_and_leave_no_worker, one_engine)
    for step in range(2):
        assert said(on_two[0].record[step] | on_two[1].record[step]) == said(alone.record[step])
        for name in ("actor/loss", "actor/grad_norm"):
            assert on_two[0].steps[step][name] == pytest.approx(alone.steps[step][name], rel=1e-4)
    for rank in shared:
        assert said(rank.record[0]) == said(alone.record[0])


@pytest.mark.slow
def test_four_ranks_hold_the_same_conversations(alone: Result, policy: Path, tmp_path: Path, ranks4: RankPool) -> None:
    on_four = ranks4.run(fit, run(talking(policy), tmp_path / "four", FSDP))
    for step in range(2):
        held = {path: row for rank in on_four for path, row in rank.record[step].items()}
        assert said(held) == said(alone.record[step])
        assert [len(rank.record[step]) for rank in on_four] == [GROUP] * 4
        for name in ("actor/loss", "actor/grad_norm"):
            assert on_four[0].steps[step][name] == pytest.approx(alone.steps[step][name], rel=1e-4)


def test_the_loss_is_of_the_tokens_that_the_policy_sampled(alone: Result, policy: Path) -> None:
    """In float64, one conversation at a time: with one update a step the ratio is 1, and w is pi / mu of the engine."""
    model, rows = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64), alone.record[0]
    assert {row["turns"] for row in rows.values()} == {1, 2, 3}
    terms = []
    for path, row in rows.items():
        group = torch.tensor([other["reward"] for of, other in rows.items() if of[0] == path[0]], dtype=torch.float64)
        spread = group.std(correction=1)
        advantage = 0.0 if spread == 0 else (row["reward"] - group.mean()) / (spread + 1e-6)
        ids = torch.tensor([[*row["prompt"], *row["response"]]])
        with torch.no_grad():
            spoken = model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        logprobs = spoken.gather(1, ids[0, len(row["prompt"]) :, None])[:, 0]
        mask = torch.tensor(row["mask"])
        weights = (logprobs - torch.tensor(row["logprobs"], dtype=torch.float64)).exp()
        terms.append(-(advantage * weights)[mask])
    assert alone.steps[0]["actor/loss"] == pytest.approx(float(torch.cat(terms).mean()), rel=1e-4, abs=1e-6)


def test_logged_metrics_are_those_of_the_sampled_conversations(alone: Result) -> None:
    for step, rows in zip(alone.steps, alone.record, strict=True):
        written = sum(sum(row["mask"]) for row in rows.values())
        assert step["rollout/tokens"] == written
        assert step["rollout/length"] == pytest.approx(written / len(rows))
        assert step["rollout/written"] == pytest.approx(written / sum(len(row["mask"]) for row in rows.values()))
        assert step["rollout/turns"] == pytest.approx(sum(row["turns"] for row in rows.values()) / len(rows))
        assert (
            step["reward/environment"]
            == step["reward/mean"]
            == pytest.approx(sum(row["reward"] for row in rows.values()) / len(rows))
        )
        assert sum(step[f"rollout/ended_{why}"] for why in ("done", "turns", "tokens", "failed")) == pytest.approx(1)
        assert 0 < step["sync/logprob_gap"] < 1e-5


def test_samples_show_conversations_turn_by_turn(alone: Result, folder: Path) -> None:
    samples, questions = list(read_samples(folder)), sums(12, PROMPTS).train
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4
    assert {sample["ended"] for sample in samples} <= {"done", "turns", "tokens"}
    for sample in samples:
        question, messages = questions[sample["row"]]["question"], sample["messages"]
        assert messages[0] == {"role": "user", "content": question}
        assert messages[1]["content"] == f"{1 + int(question.partition('+')[0]) % 3} turns", "as `Counting` says"
        (row,) = [row for row in alone.record[sample["step"] - 1].values() if row["messages"] == messages]
        spoken, said = messages[2::2], messages[3::2]
        assert {each["role"] for each in spoken} == {"assistant"}
        assert len(spoken) == sample["turns"] == row["turns"]
        odd = [sum(ord(character) % 2 for character in each["content"]) for each in spoken]
        assert [each["reward"] for each in spoken] == odd
        assert [each["content"] for each in said] == [f"odd {number}" for number in odd]
        assert ["unread" in each for each in said] == [False] * (len(said) - 1) + [True]
        assert sample["reward"] == sum(odd)
        assert (messages[-1]["ended"] == "the environment ended it") == (sample["ended"] == "done")


def test_the_trace_shows_turns_of_the_first_conversations_within_their_node(alone: Result, folder: Path) -> None:
    events = list(read_events(folder / "traces"))
    nodes = {event["args"]["step"]: event for event in events if event["name"].startswith("run       rollout")}
    for step, rows in enumerate(alone.record):
        turns = [event for event in events if event.get("cat") == "Turn" and event["args"]["step"] == step]
        node = nodes[step]
        for event in turns:
            assert node["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= node["ts"] + node["dur"]
        spoken = [sum(event["name"] == "policy" and event["tid"] == 1 + row for event in turns) for row in range(20)]
        wanted = [rows[path]["turns"] for path in sorted(rows)]
        assert len(wanted) > CONVERSATIONS
        assert spoken == [*wanted[:CONVERSATIONS], *[0] * (20 - CONVERSATIONS)]
        # In addition to the answers: one that begins, and one for the reward of the whole.
        asked = sum(event["name"] == "environment" for event in turns)
        assert asked == sum(spoken) + 2 * CONVERSATIONS
    assert "Turn" not in {span.category for span in spans(events)}, "the report is of tasks"


def test_time_in_environments_is_logged_apart_from_the_policy_s(policy: Path, tmp_path: Path) -> None:
    """With one call at a time in the rank's own process each follows another, and so nothing is done meanwhile."""
    slow = Environment("tests.controller.answering.Slow", max_turns=3, max_turn_length=6, max_concurrent=1)
    (step,) = fit(run(talking(policy, environment=slow), tmp_path / "run", max_steps=1)).steps
    least = Slow.SECONDS * step["rollout/turns"]
    assert least <= step["rollout/environment_seconds"]
    waited = step["rollout/environment_wait"] * step["time/rollout"]
    assert PROMPTS * GROUP * step["rollout/environment_seconds"] <= waited * 1.05
    assert waited < step["time/rollout"]


def test_a_reward_is_added_to_what_the_environment_gives(policy: Path, tmp_path: Path) -> None:
    reward = CallableReward("tests.controller.answering.five")
    (step,) = fit(run(talking(policy, reward=reward), tmp_path / "run", max_steps=1)).steps
    assert step["reward/mean"] == 5
    assert step["reward/outcome"] == pytest.approx(5 + step["reward/environment"])
    for sample in read_samples(tmp_path / "run"):
        given = sum(each.get("reward", 0) for each in sample["messages"])
        assert (sample["reward"], sample["parts"]) == (5 + given, {"environment": given})


def test_validation_holds_conversations(policy: Path, tmp_path: Path) -> None:
    held = run(talking(policy), tmp_path / "run", max_steps=1)
    held.data.validation = held.data.train
    summary = fit(held).summary
    assert summary["reward_before"] > 0
    assert summary["turns_before"] > 1
    assert summary["length_before"] > 6, "several turns"


def test_validation_by_itself_ends_the_processes_of_environments(policy: Path, tmp_path: Path) -> None:
    data = sums(4, PROMPTS, held_out=1)
    data.chat_template, data.max_prompt_length = True, 120
    environment = Environment(ANSWERING, max_turns=1, max_turn_length=6, timeout_s=60, workers=1)
    settings = {"accelerator": "cpu", "strategy": SingleProcess(), "rollout": TransformersEngine()}
    found = Trainer(str(tmp_path / "run"), **settings).validate(talking(policy, environment=environment), data)  # type: ignore[arg-type]
    assert found["val/turns"] == 1
    assert not workers()


@pytest.mark.parametrize("algorithm", [GDPO, TreeRL])
def test_an_algorithm_that_cannot_converse_takes_no_environment(policy: Path, algorithm: type) -> None:
    reward, environment = CallableReward("tests.controller.answering.five"), Environment(ANSWERING)
    with pytest.raises(TypeError, match="unexpected keyword argument 'environment'"):
        algorithm(CausalLM(str(policy)), reward, environment=environment)


def test_a_prompt_that_is_too_long_with_what_begins_the_conversation_is_refused(policy: Path, tmp_path: Path) -> None:
    short = run(talking(policy), tmp_path / "run")
    short.data.max_prompt_length = 30
    with pytest.raises(UserError, match=r"a conversation begins with \d+ tokens .*`data.max_prompt_length` is 30"):
        fit(short)


def test_an_environment_that_fails_is_left_out_of_the_loss(policy: Path, tmp_path: Path) -> None:
    broken = Environment("tests.controller.answering.Broken", max_turns=3, max_turn_length=6, on_failure="mask")
    found = fit(run(talking(policy, environment=broken), tmp_path / "run", max_steps=1))
    (step,), (rows,) = found.steps, found.record
    assert 0 < step["rollout/ended_failed"] < 1
    failed = [row for row in rows.values() if not any(row["mask"])]
    why = {row["messages"][-1]["ended"] for row in failed}
    assert why == {f"the environment failed: `{each}` raised RuntimeError: broken" for each in ("reset", "step")}
    assert len(failed) / len(rows) == pytest.approx(step["rollout/ended_failed"])
    tokens = sum(len(row["mask"]) for row in rows.values())
    assert step["rollout/written"] == pytest.approx(step["rollout/tokens"] / tokens), "what failed is the policy's too"


@pytest.mark.parametrize(("name", "given", "met"), [("Meeting", {}, {12}), ("Couples", {"max_concurrent": 2}, {2})])
def test_coroutines_of_a_rank_s_conversations_wait_side_by_side_as_many_as_may(
    policy: Path, tmp_path: Path, name: str, given: dict[str, Any], met: set[int]
) -> None:
    """Each conversation begins when all others, or one other, are beginning too; they share a lock in all steps."""
    Meeting.here = Meeting.most = 0
    Meeting.door = asyncio.Semaphore()
    meeting = Environment(f"tests.controller.answering.{name}", max_turns=1, max_turn_length=6, **given)
    fit(run(talking(policy, environment=meeting), tmp_path / "run", max_steps=2))
    assert {Meeting.most} == met


def test_an_environment_that_ends_the_run_names_the_row_by_its_number(policy: Path, tmp_path: Path) -> None:
    held = run(talking(policy, environment=Environment("tests.controller.answering.Broken")), tmp_path / "run")
    with pytest.raises(UserError, match=r"raised RuntimeError: broken; correct it, or .*\(the row is \d+, ") as raised:
        fit(held)
    place, _, row = str(raised.value).partition("(the row is ")[2].partition(", ")
    assert row.startswith(f"{held.data.train[int(place)]})")
