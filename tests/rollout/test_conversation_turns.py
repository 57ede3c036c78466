"""Conversations with a real engine: what the policy reads is what was written, to the token, whoever answers first."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.environments.bridge import message
from rlflow.environments.environment import defined
from rlflow.environments.host import Host, HostError, InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.errors import UserError
from rlflow.rollout import Completion, RolloutEngine, Sampling, TransformersEngine
from rlflow.rollout.conversation import Conversation, Rules, converse, to_rollout
from rlflow.rollout.conversation_loop import ConversationLoop, EnvironmentCalls, SharedCalls, TurnQueue
from rlflow.rollout.sampling import without_truncated
from rlflow.values.path import RowPath
from rlflow.values.rollout import Ending
from rlflow.worker import Limits, Worker
from tests.environments.games import Stuck
from tests.rollout.trained import buckets, load, perturb, setup
from tests.worker_processes import workers

PLACES = 6
ROWS = [{"turns": 1 + place % 4, "place": place} for place in range(PLACES)]


class Echo:
    """Repeats the length of what it hears, for as many turns as the row says."""

    waits = 0.0
    fails_at = -1

    def reset(self, turns: int, place: int) -> None:
        self.left, self.place = turns, place

    def initial_observation(self) -> str:
        return f"go {self.left}"

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(random.random() * self.waits)
        if self.place == self.fails_at:
            raise RuntimeError("broken")
        self.left -= 1
        said = len(message["content"])
        return {"reward": said / 10, "episode_done": self.left == 0, "next_messages": [message_of(str(said))]}


class Talkative(Echo):
    """Says ten characters for each turn that the row has."""

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"reward": 0.5, "episode_done": False, "next_messages": [message_of("a" * 10 * self.left)]}


class Picky(Echo):
    """Speaks in a role that a strict template does not know."""

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"episode_done": False, "next_messages": [{"role": "system", "content": "go on"}]}


class SlowEcho(Echo):
    waits = 0.02


class BrokenEcho(Echo):
    fails_at = 2


def message_of(text: str) -> dict[str, Any]:
    return message("user", text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlflow.models.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", layers=1, max_position=512)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = load(folder)
    perturb(model, seed=3, scale=0.1)
    return model


@pytest.fixture(scope="module")
def engine(folder: Path, model: Any) -> Iterator[RolloutEngine]:
    engine = setup(TransformersEngine(), folder)
    engine.update_weights(buckets(model), 0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def held(
    engine: RolloutEngine,
    tokenizer: Any,
    environment: type = Echo,
    places: Sequence[int] = range(PLACES),
    max_concurrent: int = PLACES,
    lockstep: bool = False,
    sharing: SharedCalls | None = None,
    version: int = 0,
    hosts: Sequence[Host] | None = None,
    rows: Sequence[dict[str, Any]] | None = None,
    **rules: Any,
) -> list[Conversation]:
    """Conversations of these places, to their ends."""
    settings = {"max_turns": 3, "longest_prompt": 200, "longest": 120, "longest_turn": 6, **rules}
    how, bridge = Rules("actor", **settings), TemplateBridge(tokenizer)
    local = [Local(environment) for _ in places]
    queues = {"actor": TurnQueue(engine, Sampling(6, 1.0, (tokenizer.eos_token_id, bridge.end)), version)}
    conversations = [
        converse(
            Session(defined(environment), host, row),
            bridge,
            [message("system", "s")],
            row,
            lambda turn, place=place: 100 * place + turn,  # type: ignore[misc]
            how,
        )
        for place, row, host in zip(places, rows or [ROWS[at] for at in places], hosts or local, strict=True)
    ]
    calls = EnvironmentCalls(max_concurrent, sharing)
    try:
        return ConversationLoop[Conversation](queues, calls, lockstep).run(conversations, max_concurrent)
    finally:
        calls.close()


class Local(InProcess):
    """Makes a class that no path leads to."""

    def __init__(self, environment: type) -> None:
        super().__init__()
        self._environment = environment

    def make(self, path: str) -> None:
        self._kept = self._environment()


def test_logprobs_are_those_of_the_model_reading_the_whole_conversation(
    engine: RolloutEngine, tokenizer: Any, model: Any
) -> None:
    for one in held(engine, tokenizer):
        ids = torch.tensor([one.prompt + one.tokens])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(one.prompt) - 1 : -1]
        scored = torch.log_softmax(logits, -1).gather(-1, ids[0, len(one.prompt) :, None])[:, 0]
        written = torch.tensor(one.written)
        assert written.any()
        torch.testing.assert_close(scored[written], torch.tensor(one.logprobs)[written], atol=1e-5, rtol=0)


def test_what_the_policy_reads_is_what_the_template_writes(engine: RolloutEngine, tokenizer: Any) -> None:
    """In conversations in which every turn ended by itself; a turn that was cut gets its end."""
    several = 0
    for one in held(engine, tokenizer):
        text = tokenizer.decode(one.prompt + one.tokens)
        assert text.startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\ngo")
        answers = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>user\n")[2:]]
        spoken = [each["content"] for each in one.messages if each["role"] == "assistant"]
        assert answers == [str(len(said)) for said in spoken[: len(answers)]]
        assert len(spoken) == one.turns
        several += one.turns > 1
    assert several > 2


def test_segments_say_who_wrote_what_and_rewards_are_of_turns(engine: RolloutEngine, tokenizer: Any) -> None:
    conversations = held(engine, tokenizer)
    path = RowPath(torch.arange(PLACES)[:, None], ("batch",)).children(torch.ones(PLACES, dtype=torch.int64), "steps")
    rollout = to_rollout(
        conversations, path, ROWS, 3, partial(tokenizer.decode, skip_special_tokens=True), torch.float32
    )
    assert torch.equal(rollout.loss_mask, rollout.turn >= 0)
    assert rollout.turns.tolist() == [each.turns for each in conversations]
    assert [int(row.max()) + 1 for row in rollout.turn] == rollout.turns.tolist()
    for row, one in enumerate(conversations):
        spoken = [each["content"] for each in one.messages if each["role"] == "assistant"]
        assert rollout.texts[row] == spoken[-1], "what a reward reads"
        wanted = torch.tensor([len(text) / 10 for text in spoken])
        torch.testing.assert_close(rollout.returns[row, : len(spoken)], wanted)
        assert not rollout.returns[row, len(spoken) :].any()
    assert not rollout.logprobs[~rollout.loss_mask].any()
    assert set(rollout.version.tolist()) == {3}


def test_conversations_end_as_the_environment_or_the_limits_say(engine: RolloutEngine, tokenizer: Any) -> None:
    ends = [each.ended for each in held(engine, tokenizer)]
    assert ends == [Ending.DONE if row["turns"] <= 3 else Ending.TURNS for row in ROWS]
    short = held(engine, tokenizer, longest=30)
    assert Ending.TOKENS in [each.ended for each in short]
    assert max(len(each.tokens) for each in short) <= 30
    full = [each for each in held(engine, tokenizer, longest=3) if each.ended == Ending.TOKENS]
    assert all("the policy's turn reached `max_response_length`, 3 tokens" in each.why for each in full if each.cut)
    assert any(each.cut for each in full)


def test_a_conversation_is_cut_where_tokens_ran_out_and_nowhere_else(engine: RolloutEngine, tokenizer: Any) -> None:
    """One that had all turns, or whose environment failed under `zero`, stays in the loss of `mask_truncated`."""
    conversations = [*held(engine, tokenizer), *held(engine, tokenizer, longest=30)]
    conversations[0].end(Ending.FAILED, "as under `zero`")
    path = RowPath(torch.arange(2 * PLACES)[:, None], ("batch",))
    rollout = to_rollout(conversations, path, [*ROWS, *ROWS], 0, tokenizer.decode, torch.float32)
    cut = torch.tensor([one.ended == Ending.TOKENS for one in conversations])
    assert {one.ended for one in conversations} == {*Ending}
    assert torch.equal(rollout.finished, ~cut)
    assert torch.equal(without_truncated(rollout, 30).loss_mask, rollout.loss_mask & ~cut[:, None])


def test_an_observation_that_leaves_no_room_is_not_read_and_its_turn_is_rewarded(
    engine: RolloutEngine, tokenizer: Any
) -> None:
    """Around what it says the template writes 20 tokens, and the end of the turn before it where that was cut."""
    ends = []
    for one, row in zip(held(engine, tokenizer, Talkative, longest=52, max_turns=2), ROWS, strict=True):
        turn = one.segments[0]
        said = 10 * row["turns"] + 20 + (tokenizer.convert_ids_to_tokens(one.tokens[turn - 1]) != "<|im_end|>")
        fits = turn + said < 52
        assert fits == (len(one.segments) > 1)
        ends.append(fits)
        if not fits:
            assert (one.ended, one.rewards, one.segments) == (Ending.TOKENS, [0.5], [len(one.tokens)])
            assert one.why.startswith("what the environment said leaves the policy no room within")
            assert all(one.written)
    assert set(ends) == {True, False}


def test_messages_that_a_template_refuses_are_named_by_environment_turn_and_row(
    engine: RolloutEngine, tokenizer: Any
) -> None:
    strict = deepcopy(tokenizer)
    refuse = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('no such role') }}{% endif %}"
    written = "{% for message in messages %}"
    assert written in strict.chat_template
    strict.chat_template = strict.chat_template.replace(written, written + refuse)
    said = (
        r"refuses the messages .no such role.; correct the row, or take another template"
        r" .answering turn 1, the environment is `.*\.Picky`, .*row is {'turns"
    )
    with pytest.raises(UserError, match=said):
        held(engine, strict, Picky)


def test_neither_delays_nor_threads_nor_other_conversations_change_a_token(
    engine: RolloutEngine, tokenizer: Any
) -> None:
    plain = held(engine, tokenizer, lockstep=True)
    delayed = held(engine, tokenizer, SlowEcho)
    few = held(engine, tokenizer, SlowEcho, max_concurrent=2)
    few_together = held(engine, tokenizer, SlowEcho, max_concurrent=2, lockstep=True)
    apart = [*held(engine, tokenizer, places=[0, 1]), *held(engine, tokenizer, places=[2, 3, 4, 5])]
    for other in (delayed, few, few_together, apart):
        assert [each.tokens for each in other] == [each.tokens for each in plain]
        assert [each.rewards for each in other] == [each.rewards for each in plain]


def test_in_lockstep_delays_change_no_batch(engine: RolloutEngine, tokenizer: Any, monkeypatch: Any) -> None:
    """So that log-probabilities are the same to the bit: the engine is given the same batches."""
    batches: list[list[list[int]]] = []
    generate = engine.generate

    def noted(prompts: Sequence[Sequence[int]], *args: Any) -> list[Completion]:
        batches.append(list(map(list, prompts)))
        return generate(prompts, *args)

    monkeypatch.setattr(engine, "generate", noted)
    held(engine, tokenizer, max_concurrent=2, lockstep=True)
    calls = len(batches)
    held(engine, tokenizer, SlowEcho, max_concurrent=2, lockstep=True)
    assert batches[:calls] == batches[calls:]


class Waiting(Echo):
    """At the first place, answers when all others are over."""

    over = 0
    changed = threading.Condition()

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with Waiting.changed:
            if self.place == 0:
                in_time = Waiting.changed.wait_for(lambda: Waiting.over == PLACES - 1, timeout=20)
                return {"reward": float(in_time), "episode_done": True, "next_messages": []}
            Waiting.over += self.left == 1
            Waiting.changed.notify_all()
        return {**super().step(message), "episode_done": self.left == 0}


@pytest.mark.parametrize("max_concurrent", [2, PLACES])
def test_an_environment_that_takes_long_holds_up_nobody(
    engine: RolloutEngine, tokenizer: Any, max_concurrent: int
) -> None:
    """With two workers, all others take their turn in the second."""
    Waiting.over = 0
    conversations = held(engine, tokenizer, Waiting, max_concurrent=max_concurrent, max_turns=4)
    assert conversations[0].rewards == [1.0]
    plain = held(engine, tokenizer, max_turns=4)
    assert [each.tokens for each in conversations[1:]] == [each.tokens for each in plain[1:]]


@pytest.mark.parametrize("on_failure", ["raise", "zero", "mask"])
def test_an_environment_that_hangs_ends_by_its_limit(engine: RolloutEngine, tokenizer: Any, on_failure: str) -> None:
    places = [0, 1, 2]
    starts = [{"start": 7}, {"start": 13}, {"start": 8}]
    hosts = [Worker(Limits(timeout_s=3)) for _ in places]
    given = {"rows": starts, "hosts": hosts, "on_failure": on_failure}
    try:
        if on_failure == "raise":
            with pytest.raises(UserError, match=r"failed at turn 1: `step` took longer than 3 s; correct"):
                held(engine, tokenizer, Stuck, places, **given)
        else:
            found = held(engine, tokenizer, Stuck, places, **given)
            assert [(each.ended, each.rewards) for each in found] == [
                (Ending.DONE, [1.0]),
                (Ending.FAILED, [0.0]),
                (Ending.DONE, [1.0]),
            ]
            assert [any(each.written) for each in found] == [True, on_failure == "zero", True]
    finally:
        for host in hosts:
            host.close()
    assert not workers()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("environment_")]


def test_an_environment_that_fails_ends_the_run_or_its_conversation(engine: RolloutEngine, tokenizer: Any) -> None:
    said = r"^the environment `.*BrokenEcho` failed at turn 1: `step` raised RuntimeError: broken; .*row is {'turns': 3"
    with pytest.raises(UserError, match=said):
        held(engine, tokenizer, BrokenEcho)
    plain = held(engine, tokenizer)
    for how in ("zero", "mask"):
        conversations = held(engine, tokenizer, BrokenEcho, on_failure=how)
        broken = conversations.pop(2)
        assert (broken.ended, sum(broken.rewards)) == (Ending.FAILED, 0)
        assert any(broken.written) == (how == "zero")
        assert [each.tokens for each in conversations] == [each.tokens for at, each in enumerate(plain) if at != 2]


class Busy(BrokenEcho):
    """Fails at one place at once; the others take their time."""

    busy = 0

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self.place != self.fails_at:
            Busy.busy += 1
            time.sleep(0.3)
            Busy.busy -= 1
        return super().step(message)


def test_no_environment_runs_on_where_one_ended_the_run(engine: RolloutEngine, tokenizer: Any) -> None:
    with pytest.raises(UserError, match="RuntimeError: broken"):
        held(engine, tokenizer, Busy)
    assert Busy.busy == 0


def test_a_prompt_that_is_too_long_is_refused(engine: RolloutEngine, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"begins with \d+ tokens .* and `data.max_prompt_length` is 10, .*row is {"):
        held(engine, tokenizer, longest_prompt=10)


def test_ranks_that_share_an_engine_receive_what_the_first_answers() -> None:
    """And only the first one calls environments."""
    said: list[bytes] = []
    called: list[int] = []

    def bring(message: bytes) -> bytes:
        said.append(message)
        return said[0]

    first, second = (
        EnvironmentCalls(2, SharedCalls(True, bring, 60)),
        EnvironmentCalls(2, SharedCalls(False, bring, 60)),
    )
    for number, call in enumerate([lambda: {"a": 1.5}, failed, lambda: None]):
        first.submit(number, call)
        second.submit(number, lambda: called.append(1))
    answers = first.answers(3)
    assert [number for number, _ in answers] == [0, 1, 2]
    assert [answers[0][1], answers[2][1]] == [{"a": 1.5}, None]
    assert str(answers[1][1]) == "no"
    assert list(map(repr, second.answers(3))) == list(map(repr, answers))
    second.close()
    assert not called


def test_ranks_that_call_no_environment_name_the_row_too(engine: RolloutEngine, tokenizer: Any) -> None:
    """They receive the messages of the first turn, and each rank makes the prompt from them."""
    answers = [[0, {"value": [message("user", "go")]}]]
    sharing = SharedCalls(False, lambda message: json.dumps(answers).encode(), 60)
    with pytest.raises(UserError, match=r"begins with \d+ tokens .*row is {'turns': 1, 'place': 0}"):
        held(engine, tokenizer, places=[0], sharing=sharing, longest_prompt=5)


def test_empty_rounds_are_sent_while_a_rank_waits_for_an_environment() -> None:
    rounds: list[bytes] = []
    answered = threading.Event()

    def bring(message: bytes) -> bytes:
        rounds.append(message)
        if len(rounds) == 3:
            answered.set()
        return message

    calls = EnvironmentCalls(1, SharedCalls(True, bring, 0.01))
    calls.submit(5, lambda: answered.wait(60))
    assert calls.answers(1) == [(5, True)]
    assert rounds[:3] == [b"[]"] * 3


def test_an_unforeseen_error_is_a_failure_that_all_ranks_receive() -> None:
    calls = EnvironmentCalls(1, SharedCalls(True, lambda message: message, 60))
    calls.submit(0, lambda: {1, 2})
    ((_, answers),) = calls.answers(1)
    assert str(answers) == "TypeError: Object of type set is not JSON serializable"


def test_an_error_of_our_own_ends_the_run_on_all_ranks_with_its_traceback() -> None:
    """It is not a failure of the environment, which `on_failure` would make a reward of."""
    said: list[bytes] = []

    def bring(message: bytes) -> bytes:
        said.append(message)
        return said[0]

    for calls in (
        EnvironmentCalls(1, SharedCalls(True, bring, 60)),
        EnvironmentCalls(1, SharedCalls(False, bring, 60)),
    ):
        calls.submit(0, lambda: {}["gone"])
        with pytest.raises(RuntimeError, match=r"(?s)Traceback.*test_conversation_turns.py.*KeyError: 'gone'"):
            calls.answers(1)


@pytest.mark.parametrize(("code", "called"), [(3, r"`sys\.exit\(3\)`"), (None, r"`sys\.exit\(\)`")])
def test_an_environment_that_exits_ends_the_run_in_one_line(code: int | None, called: str) -> None:
    """The thread of the call would end without an answer, and the run would wait for one."""
    calls = EnvironmentCalls(1)
    calls.submit(0, lambda: sys.exit(code))
    with pytest.raises(UserError, match=f"an environment called {called} .* raise an error instead"):
        calls.answers(1)
    assert calls.close()


def add(a: float, b: float) -> float:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_a_turn_that_was_cut_is_not_an_answer(engine: RolloutEngine, tokenizer: Any) -> None:
    """Of six tokens few turns end by themselves; one that called no tool might have gone on to."""
    how = Rules(
        "actor",
        max_turns=2,
        longest_prompt=400,
        longest=99,
        longest_turn=6,
    )
    bridge = TemplateBridge(tokenizer, [{"function": {"name": "add", "parameters": {}}}])
    definition = defined(None, [add])
    sessions = [Session(definition, InProcess(), {}) for _ in range(8)]
    conversations = [
        converse(session, bridge, [message("user", str(i))], {}, lambda turn, i=i: i, how)  # type: ignore[misc]
        for i, session in enumerate(sessions)
    ]
    queue = TurnQueue(engine, Sampling(6, 1.0, (bridge.end,)), 0)
    conversations = ConversationLoop[Conversation]({"actor": queue}, EnvironmentCalls(1)).run(conversations, 8)
    for one in conversations:
        assert one.ended == (Ending.DONE if one.tokens[-1] == bridge.end else Ending.TOKENS)
    assert Ending.TOKENS in [one.ended for one in conversations]


def failed() -> None:
    raise HostError("no")
