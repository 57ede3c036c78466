"""Agents that own their loop: the policy's answers become rows, in any order of calls and with any failure."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlflow import Harness
from rlflow.context.conversations import ConversationRunner, EpisodeCounts
from rlflow.errors import UserError
from rlflow.harness.apis import APIS, RequestError
from rlflow.harness.door import Door
from rlflow.rollout import RolloutEngine
from rlflow.values.rollout import Ending
from rlflow.values.truncation import Truncation
from tests.harness.agents import CRITIC, SLEEPS
from tests.harness.episodes import (
    AGENTS,
    ScriptedConversations,
    decode,
    played,
    running,
    sampling_engine,
    says,
    tokenizer,
)
from tests.worker_processes import workers

SUM = {"question": "2+3=", "answer": "5"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.fixture(scope="module")
def engine(policy: Path) -> RolloutEngine:
    return sampling_engine(policy)


@pytest.fixture(scope="module")
def runner() -> Iterator[ConversationRunner]:
    with running() as made:
        yield made
    assert not workers()


def test_a_conversation_of_an_agent_is_one_row_with_the_tokens_that_were_sampled(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    made = played("talks", engine, runner=runner)
    (row,) = made.rows
    _, prompt, response, mask, segments, rewards, inherited, _, logprobs = row
    assert decode(prompt) == decode(
        tokenizer()("<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    )
    assert (len(segments), rewards, inherited) == (5, [0.0, 0.0, 7.0], 0)
    place = 0
    for number, length in enumerate(segments):
        part = response[place : place + length]
        assert mask[place : place + length] == [number % 2 == 0] * length
        assert all((x != 0) == (number % 2 == 0) for x in logprobs[place : place + length])
        if number % 2:
            written = f"\n<|im_start|>user\nand {number // 2}?<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer().decode(part).removeprefix("<|im_end|>") == written
        place += length
    assert made.times.episodes == EpisodeCounts(count=1, refused=0, undelivered=0, rewritten=0)


def test_each_token_that_an_agent_received_is_trained_once_whoever_called_first(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    rows = [{"question": "1+1=", "waits": 0.02}]
    first, again = (played("branches", engine, rows, n=2, runner=runner) for _ in range(2))
    assert [row[:-1] for row in first.rows] == [row[:-1] for row in again.rows]
    for one, other in zip(first.rows, again.rows, strict=True):
        assert one[-1] == pytest.approx(other[-1], abs=1e-4)  # batches differ, and with them the last bits
    # Rows of an episode: three forks of three turns, two helpers of two, and a summary.
    assert [row[7] for row in first.rows] == [0, 1, 2, 3, 4, 5] * 2
    assert [len(row[4]) // 2 + 1 for row in first.rows] == [3, 3, 3, 2, 2, 1] * 2
    for episode in (first.rows[:6], first.rows[6:]):
        assert {row[5][-1] for row in episode} == {float(sum(sum(row[3]) for row in episode))}


@pytest.mark.parametrize(
    "agent",
    [
        "calls_a_tool",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("responds", "responds_in_events", "claude")),
    ],
)
def test_a_call_of_a_tool_is_read_and_its_result_continues_the_sampled_tokens(
    agent: str, runner: ConversationRunner
) -> None:
    made = played(agent, says(CALL, "5"), [SUM], runner=runner)
    assert [row[5] for row in made.rows] == [[0.0, 1.0]]
    assert made.text(0) == (
        "<|im_start|>system\nTools: add(a, b)<|im_end|>\n<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"
        f"{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert made.trained() == [f"{CALL}<|im_end|>5<|im_end|>"]
    assert made.views[0].calls == 1


def test_the_output_of_a_function_may_be_parts_of_text() -> None:
    def output(kind: str) -> str:
        call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "a", "output": [{"type": kind, "text": "5"}]}
        body = {"model": "policy", "input": [call, result]}
        return str(APIS["/v1/responses"].read_request(body, {"policy": 1.0}, ()).messages[-1]["content"])

    assert output("input_text") == "5"
    with pytest.raises(RequestError, match="a content of type 'input_image', and only text is read"):
        output("input_image")


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud83d"'])
def test_a_call_that_json_cannot_hold_is_text(value: str, runner: ConversationRunner) -> None:
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    made = played("gets_text", says(call), [{**SUM, "answer": call}], runner=runner)
    assert [row[5] for row in made.rows] == [[1.0]]


def test_a_branch_has_the_reward_of_its_name_whichever_calls_first(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    orders = (["left", "right"], ["right", "left"])
    one, other = (played("credits", engine, [{"question": "1+1=", "order": each}], runner=runner) for each in orders)
    assert sorted(row[5] for row in one.rows) == [[-0.5], [0.25], [1.0]]
    assert [row[:-1] for row in one.rows] == [row[:-1] for row in other.rows]


def test_rows_know_which_turns_they_share(engine: RolloutEngine, runner: ConversationRunner) -> None:
    made = played("forks_twice", engine, n=2, runner=runner).rollout
    # Rows of an episode: a call, `left` and `more` after it; the same call and `right`; and `alone`.
    assert [each.tolist() for each in made.calls.rows()] == [[0, 1, 2], [0, 3], [4]] * 2
    of_one = torch.tensor([[0, 1, 2], [0, 3, -1], [4, -1, -1]])
    assert torch.equal(made.shared_turns, torch.cat([of_one, of_one.where(of_one < 0, of_one + 18)]))
    assert made.first.tolist() == [True, False, False] * 2
    begun = int(made.inherited[1])
    rows = "row 1 of 3 of", f"row 2 of 3 of the episode, which begins with {begun} tokens of row 1", "row 3 of 3 of"
    for said, row in zip(made.messages, rows * 2, strict=True):
        assert row in said[-1]["ended"]


def test_another_name_is_another_policy_which_answers_and_has_no_row(runner: ConversationRunner) -> None:
    rivals, players = {"rival": says("good")}, {CRITIC: ("rival", 0.5, Truncation())}
    more: dict[str, Any] = {"runner": runner, "other_models": CRITIC}
    made = played("asks_a_critic", says("5", "6"), players=players, rivals=rivals, **more)
    assert made.trained() == ["5<|im_end|>6<|im_end|>"]
    assert "<|im_start|>user\nI heard good<|im_end|>" in made.text(0)
    assert made.times.episodes == EpisodeCounts(count=1, refused=0, undelivered=0, rewritten=0)
    alone = played("asks_a_critic", says("5", "good", "6"), **more)  # where nobody plays it, the policy does
    assert sorted(alone.trained()) == ["5<|im_end|>6<|im_end|>", "good<|im_end|>"]
    with pytest.raises(
        UserError, match=r"`players` has `critic`, and the harness `tests\.harness\.agents\.acts` calls"
    ):
        played("asks_a_critic", says(), players={"critic": ("rival", 0.5, Truncation())}, rivals=rivals, **more)


def test_a_text_continues_the_tokens_that_were_sampled_and_has_no_turns(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    made = played("completes", engine, runner=runner)
    long, again, ids = made.rows
    assert tokenizer().decode(long[1]) == tokenizer().decode(again[1]) == "2+3="
    assert (long[4], len(again[4])) == ([6, len(tokenizer()(" so")["input_ids"]), 4], 1)
    assert tokenizer().decode(long[2][long[4][0] :][: long[4][1]]) == " so"
    assert ids[1] == [5, 6, 7]
    assert [row[5][-1] for row in made.rows] == [13.0] * 3
    assert sum(sum(row[3]) for row in made.rows) == 13


@pytest.mark.slow
def test_a_text_has_no_token_that_ends_an_answer(runner: ConversationRunner) -> None:
    made = played("completes_sums", says("5", "6"), [{"question": "2+3=", "answer": "2+3=5+1=6"}], runner=runner)
    assert [made.text(row) for row in range(2)] == ["2+3=5+1=6<|im_end|>", "2+3=5<|im_end|>"]
    assert [row[5] for row in made.rows] == [[1.0]] * 2


@pytest.mark.slow
def test_streams_several_answers_and_logprobs_are_of_the_same_tokens(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    made = played("streams", engine, runner=runner)
    assert [row[5][-1] for row in made.rows] == [3.0, 3.0, 3.0]
    assert [any(row[3][: row[4][0]]) for row in made.rows] == [True, False, False]  # the first turn is trained once


def test_an_answer_ends_with_the_token_that_completes_a_text_at_which_it_is_to_stop(
    runner: ConversationRunner,
) -> None:
    made = played("stops", says("add 2 and 3\nResult: 6, Result: 7", "5"), [SUM], runner=runner)
    assert [row[5] for row in made.rows] == [[0.0, 1.0]]
    assert made.trained() == ["add 2 and 3\nResult:5<|im_end|>"]
    assert "Result:<|im_end|>\n<|im_start|>user\n5<|im_end|>" in made.text(0)


def test_a_retry_gets_the_stored_answer_and_an_equal_call_another_one(
    engine: RolloutEngine, runner: ConversationRunner
) -> None:
    made = played("retries", engine, runner=runner)
    assert [row[5] for row in made.rows] == [[1.0]] * 3


def test_what_cannot_be_served_is_refused_in_the_form_of_the_api(
    runner: ConversationRunner, caplog: pytest.LogCaptureFixture
) -> None:
    made = played("refused", says(), runner=runner)
    told, of_key = [each.getMessage() for each in caplog.records if "is refused" in each.getMessage()]
    assert [each for each in caplog.messages if "what is not served: there is no GET /v1/files" in each]
    assert "there is no model 'gpt-4o'" in told
    assert "(episode 0 of the row 0, {" in told
    assert "a key of no episode" in of_key
    assert (made.rows[0][5], made.times.episodes.refused) == ([30.0], 33)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "raised ValueError"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("exits", "code 3"), ("hangs", "longer than 3 s"), ("nan", "nan"), ("huge", "1000000"))
        ),
    ],
)
def test_an_agent_that_fails_is_one_failed_episode_and_leaves_nothing(
    engine: RolloutEngine, how: str, why: str
) -> None:
    rows, before = [{"question": "1+1=", "how": how}, {"question": "1+2=", "how": "no"}], workers()
    longest = 3 if how == "hangs" else 60
    with running() as runner:
        made = played("fails", engine, rows, runner=runner, on_failure="zero", timeout_s=longest)
        assert made.rollout.ended.tolist() == [Ending.FAILED, Ending.DONE]
        assert made.rollout.returns.sum(dim=1).tolist() == [0.0, 1.0]
        assert why in made.rollout.messages[0][-1]["ended"]
        assert "sk-" not in json.dumps(made.rollout.messages)
        masked = played("fails", engine, rows, runner=runner, on_failure="mask", timeout_s=longest)
        assert masked.rollout.loss_mask.any(dim=1).tolist() == [False, True]
        with pytest.raises(UserError, match=why):
            played("fails", engine, rows, runner=runner, timeout_s=longest)
    assert workers() == before
    assert not [each for each in psutil.process_iter(["cmdline"]) if SLEEPS in (each.info["cmdline"] or ())]


@pytest.mark.slow
def test_a_process_that_an_agent_leaves_ends_with_its_episode() -> None:
    with running() as runner:
        played("leaves_a_process", says(), runner=runner)
        assert not [each for each in psutil.process_iter(["cmdline"]) if SLEEPS in (each.info["cmdline"] or ())]


@pytest.mark.slow
def test_a_key_is_of_one_episode(
    engine: RolloutEngine, runner: ConversationRunner, caplog: pytest.LogCaptureFixture
) -> None:
    made = played(
        "calls_late", engine, [{"question": f"{place}+1="} for place in range(3)], runner=runner, max_concurrent=1
    )
    assert made.rollout.returns.sum(dim=1).tolist() == [1.0] * 3
    assert made.times.episodes.refused == 2
    told = [each.getMessage() for each in caplog.records if "after the end of its episode" in each.getMessage()]
    assert [f"(episode 0 of the row {place}, " in each for place, each in enumerate(told)] == [True] * 2


@pytest.mark.slow
def test_calls_beyond_the_most_are_refused(engine: RolloutEngine, runner: ConversationRunner) -> None:
    made = played("floods", engine, runner=runner, max_calls=5)
    assert [row[5][-1] for row in made.rows] == [5.0] * 5
    assert made.times.episodes.refused == 1


@pytest.mark.slow
def test_an_answer_that_nobody_waited_for_is_in_no_row(engine: RolloutEngine, runner: ConversationRunner) -> None:
    # The agent may leave before its requests arrive, or after they are answered; it tries until it leaves between.
    made = next(
        made for _ in range(50) if (made := played("leaves", engine, runner=runner)).times.episodes.undelivered == 2
    )
    assert len(made.rows) == 1


def test_a_rank_without_prompts_has_no_episodes(engine: RolloutEngine, runner: ConversationRunner) -> None:
    made = played("talks", engine, [], n=2, runner=runner)
    assert (made.rows, made.views) == ([], [])
    assert made.times.episodes == EpisodeCounts(count=0, refused=0, undelivered=0, rewritten=0)


def test_an_episode_without_calls_is_a_row_with_its_reward(runner: ConversationRunner) -> None:
    made = played("silent", says(), runner=runner)
    assert [(row[2], row[4], row[5]) for row in made.rows] == [([], [0], [3.0])]
    assert made.rollout.loss_mask.shape == torch.Size([1, 0])


@pytest.mark.slow
def test_a_program_reads_the_row_and_prints_the_reward(engine: RolloutEngine, runner: ConversationRunner) -> None:
    code = (
        "import json, os, sys, urllib.request as u; row = json.load(sys.stdin);"
        "body = {'model': os.environ['RLFLOW_MODEL'], 'messages': [{'role': 'user', 'content': row['question']}]};"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'};"
        "ask = u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(), head);"
        "print(u.urlopen(ask).status); print(json.dumps({'reward': len(row['question'])}))"
    )
    made = played([sys.executable, "-c", code], engine, n=2, runner=runner)
    assert [row[5] for row in made.rows] == [[4.0], [4.0]]


def test_a_program_ends_before_what_it_leaves_running_and_that_is_ended(runner: ConversationRunner) -> None:
    program = ["sh", "-c", f"{shlex.join([sys.executable, '-c', SLEEPS])} & echo 1.0"]
    made = played(program, says(), runner=runner, timeout_s=60)
    assert [row[5] for row in made.rows] == [[1.0]]
    assert not [each for each in psutil.process_iter(["cmdline"]) if SLEEPS in (each.info["cmdline"] or ())]


def test_a_call_goes_to_the_door_and_to_no_proxy(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with running() as runner:
        assert [row[5] for row in played("retries", engine, runner=runner, timeout_s=59).rows] == [[1.0]] * 3
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_an_environment_that_uses_no_proxy_at_all_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("no_proxy", raising=False)
    Door().close()
    assert (os.environ["NO_PROXY"], "no_proxy" in os.environ) == ("*", False)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"run": "tests.harness.agents.no_such"}, "no_such"),
        ({"run": []}, "`run` is empty"),
        ({"run": ["no_such_program"]}, "no such program"),
        ({"run": f"{AGENTS}.talks", "max_concurrent": 0}, "`max_concurrent` is 0"),
        ({"run": f"{AGENTS}.talks", "ignore": ["top_k", "input"]}, "'input'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        _ = Harness(**settings).definitions


@pytest.mark.slow
def test_a_field_in_ignore_is_left_out_of_account(engine: RolloutEngine, runner: ConversationRunner) -> None:
    def said(made: ScriptedConversations) -> list[Any]:
        return [row[2] for row in made.rows]

    ignored = ("temperature", "reasoning_effort")
    assert said(played("at_a_temperature", engine, runner=runner, ignore=ignored)) == said(
        played("talks_once", engine, runner=runner)
    )
    with pytest.raises(UserError, match="temperature"):
        played("at_a_temperature", engine, runner=runner)
