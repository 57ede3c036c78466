"""Environments in the forms of TRL and Tinker, in the rank's process and in a worker."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlflow import Environment
from rlflow.environments.bridge import ParsedTurn, message
from rlflow.environments.environment import defined
from rlflow.environments.host import Coroutines, Host, HostError, InProcess
from rlflow.environments.session import Session
from rlflow.environments.tool_calls import TOOL_FORMS
from rlflow.errors import UserError
from rlflow.rollout.conversation_loop import EnvironmentCalls
from rlflow.worker import Limits, Worker, WorkerError, WorkerTimeout

PROMPT = [message("system", "Play."), message("user", "Guess my word.")]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def guess(word: str) -> str:
    """Guess the word.

    Args:
        word: Any.
    """
    return word


def spoken(text: str) -> ParsedTurn:
    return ParsedTurn(text, tuple(TOOL_FORMS["hermes"].calls(text, ())))


@pytest.mark.parametrize("game", ["games.WordGame", "games.LaterGame"])
def test_an_environment_of_trl_s_form_answers_tool_calls(host: Host, game: str) -> None:
    session = Session(defined(game), host)
    began = session.begin(PROMPT, {"word": "house", "level": 1})
    assert began == [PROMPT[0], message("user", "Guess my word. It has 5 letters.")]
    assert PROMPT[1]["content"] == "Guess my word.", "the prompt's own messages stay"
    first = session.answer(spoken("Let me see. " + call("guess", word="mouse")), turn=0)
    assert (first.messages, first.done, first.calls, first.failed) == (
        [message("tool", "wrong", name="guess")],
        False,
        1,
        0,
    )
    both = session.answer(spoken(call("guess", word="louse") + call("guess", word="house")), turn=1)
    assert [each["content"] for each in both.messages] == ["wrong", "right"]
    assert session.answer(spoken("It is house."), turn=2).done
    assert session.reward() == 1 / 3


@pytest.mark.parametrize("game", ["games.Letters", "games.LaterLetters"])
def test_an_environment_of_trl_s_docs_keeps_its_reward_and_raises_at_the_end(host: Host, game: str) -> None:
    session = Session(defined(game), host)
    began = session.begin(PROMPT, {"word": "mouse"})
    assert began[-1]["content"] == "Guess my word.\nYou have 3 guesses."
    first = session.answer(spoken(call("guess", guess="[house]")), turn=0)
    assert [each["content"] for each in first.messages] == ["XGGGG"]
    assert session.reward() == 0
    session.answer(spoken(call("guess", guess="[mouse]")), turn=1)
    over = session.answer(spoken(call("guess", guess="[mouse]")), turn=2)
    assert "raised ValueError" in over.messages[0]["content"]
    assert "Game over." in over.messages[0]["content"]
    assert (over.failed, over.done, session.reward()) == (1, False, 1.0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("<tool_call>{broken", "this tool call is not JSON"),
        (call("guess"), "guess needs the argument `word`"),
        (call("guess", word="a", letter="b"), "guess takes no argument `letter`; it takes word"),
        (call("guessed", word="a"), "there is no tool `guessed`; there are guess"),
        (call("guess", word=""), "raised ValueError"),
        ('<tool_call>["guess"]</tool_call>', "a tool call is an object with `name` and `arguments`"),
    ],
)
def test_a_call_that_fails_is_reported_to_the_policy_and_counted(host: Host, said: str, told: str) -> None:
    session = Session(defined("games.WordGame"), host)
    session.begin(PROMPT, {"word": "house"})
    reply = session.answer(spoken(said), turn=0)
    assert told in reply.messages[0]["content"]
    assert "\n" not in reply.messages[0]["content"]
    assert (reply.calls, reply.failed, reply.done) == (1, 1, False)


REFUSED = "this call is refused: no more than 2 may be made; answer without them"


def test_tool_calls_can_be_limited(host: Host) -> None:
    session = Session(defined(None, ["games.add"]), host, max_tool_calls=2)
    assert session.begin(PROMPT, {}) == PROMPT
    first = session.answer(spoken(call("add", a=1, b=2)), turn=0)
    assert (first.messages[0]["content"], first.done) == ("3", False)
    both = session.answer(spoken(call("add", a=1, b=2) + call("add", a=3, b=4)), turn=1)
    assert [each["content"] for each in both.messages] == ["3", REFUSED]
    assert (both.calls, both.failed, both.done) == (2, 1, False), "the policy reads what the last call gave"
    again = session.answer(spoken(call("add", a=1, b=2)), turn=2)
    assert ([each["content"] for each in again.messages], again.done, again.over) == ([REFUSED], True, "limit")
    assert session.reward() is None


def test_the_policy_may_answer_after_its_last_tool_call(host: Host) -> None:
    session = Session(defined(None, ["games.add"]), host, max_tool_calls=1)
    session.begin(PROMPT, {})
    assert not session.answer(spoken(call("add", a=1, b=2)), turn=0).done
    last = session.answer(spoken("3"), turn=1)
    assert (last.done, last.over) == (True, "answer")


def test_arguments_of_tools_may_have_any_name(host: Host) -> None:
    session = Session(defined(None, ["games.read_file"]), host)
    session.begin(PROMPT, {})
    (said,) = session.answer(spoken(call("read_file", path="a", method="b")), turn=0).messages
    assert said["content"] == "a b"


def test_a_policy_reads_the_same_of_a_tool_wherever_it_runs(host: Host) -> None:
    session = Session(defined(None, ["games.whatever"]), host)
    session.begin(PROMPT, {})
    said = session.answer(spoken("".join(call("whatever", kind=x) for x in ("pair", "day", "set", "nothing"))), turn=0)
    raised = "`games.whatever` raised ValueError: nothing at all"
    assert [each["content"] for each in said.messages] == ["(1, 2)", "2026-01-02", "{1}", raised]


def test_what_an_environment_draws_follows_from_the_seed_of_its_conversation(host: Host) -> None:
    drawing = defined("random_environments.Drawing")
    outside, said = random.getstate(), []
    for seed in (7, 2**62, 7):
        session = Session(drawing, host, seed=seed)
        began = session.begin([], {})
        said.append([each["content"] for each in began + session.answer(spoken(call("draw")), turn=0).messages])
    generator = random.Random(7)
    drawn, legacy = generator.random(), np.random.RandomState(7).random_sample()
    assert said[0] == said[2] == [f"{drawn} {legacy}", str(generator.random())]
    assert len({*said[0], *said[1]}) == 4
    assert random.getstate() == outside, "the process's own numbers stay"


def test_coroutines_in_the_process_share_an_event_loop() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, coroutines, environment = files(), Coroutines(), Environment("games.CountDown")
    for _ in range(20):
        Session(defined("games.CountDown"), environment.host(coroutines)).begin([], {"start": 1})
    assert files() - before <= 3
    coroutines.close()
    assert files() == before


def test_a_call_that_never_returns_is_not_waited_for_where_it_has_no_limit() -> None:
    calls, returns, began = EnvironmentCalls(1, limited=False), threading.Event(), time.monotonic()
    for number in range(2):
        calls.submit(number, lambda: returns.wait(60))
    assert not calls.close()
    assert time.monotonic() - began < 20
    returns.set()
    assert calls.close()


def test_what_a_policy_or_a_tool_writes_is_always_text(host: Host) -> None:
    session = Session(defined(None, ["games.half"]), host)
    session.begin(PROMPT, {})
    for said in (call("half", text="a"), call("\ud800"), "<tool_call>" + "[" * 100_000):
        (message,) = session.answer(spoken(said), turn=0).messages
        message["content"].encode("utf-8")
        message.get("name", "").encode("utf-8")


def test_a_tool_that_takes_too_long_is_a_failure_of_the_environment() -> None:
    host = Worker(Limits(timeout_s=0.5))
    session = Session(defined("games.Sleepy"), host)
    session.begin(PROMPT, {"word": "house"})
    with pytest.raises(match=r"`guess` took longer than 0\.5 s"):
        session.answer(spoken(call("guess", word="house")), turn=0)
    host.close()


def test_a_step_of_another_form_is_shown(host: Host) -> None:
    session = Session(defined("games.Tuples"), host)
    session.begin([], {"start": 1})
    with pytest.raises(HostError, match="give `reward`, `episode_done` and `next_messages`"):
        session.answer(spoken("1"), turn=0)


@pytest.mark.parametrize("game", ["games.CountDown", "games.Games.Inner"])
def test_an_environment_of_tinker_s_form_answers_messages(host: Host, game: str) -> None:
    session = Session(defined(game), host)
    assert session.begin([], {"start": 1, "level": 3}) == [message("user", "count down from 1")]
    first = session.answer(spoken("1"), turn=0)
    assert (first.messages, first.reward, first.done) == ([message("user", "next")], 1.0, False)
    assert session.answer(spoken("0"), turn=1).done


def test_an_environment_is_made_with_its_arguments(host: Host) -> None:
    session = Session(defined("games.Sized", arguments={"start": 4}), host)
    assert session.begin([], {"start": 1}) == [message("user", "count down from 4")]


def test_changes_to_arguments_by_one_environment_do_not_reach_another(host: Host) -> None:
    dealt, row = defined("games.Dealt", arguments={"deck": [1, 2]}), {"cards": [3, 4]}
    began = [Session(dealt, host).begin([], row) for _ in range(2)]
    assert began == [[message("user", "count down from 6")]] * 2


def test_an_object_given_to_an_environment_in_the_process_is_not_copied() -> None:
    host, lock = InProcess(), threading.Lock()
    host.make("games.Sized", start=lock)
    assert host.read("start") is lock


def test_a_table_or_a_read_only_array_of_an_environment_in_the_process_is_shared() -> None:
    table, fixed, host = np.zeros(2**20), np.zeros(2), InProcess()
    fixed.flags.writeable = False
    host.make("games.Sized", start=[table, fixed, torch.eye(2).to_sparse()])
    shared, alike, graph = host.read("start")
    assert shared is table
    assert alike is fixed
    assert graph.to_dense().equal(torch.eye(2))


@pytest.mark.parametrize(
    ("data", "change"),
    [
        (np.zeros(2), lambda board: board.fill(1)),
        (torch.zeros(2), lambda board: board.fill_(1)),
        ({1}, lambda used: used.clear()),
        (deque([1], maxlen=2), lambda moves: moves.extend([2, 3])),
        (defaultdict(list, {"a": [1]}), lambda seen: seen["a"].append(2)),
        (([1],), lambda sides: sides[0].append(2)),
        (random.Random(0), lambda draws: draws.random()),
        (np.random.default_rng(0), lambda draws: draws.random()),
    ],
)
def test_data_that_an_environment_in_the_process_changes_is_its_own(data: Any, change: Callable[[Any], Any]) -> None:
    host, before = InProcess(), pickle.dumps(data)
    host.make("games.Sized", start=[data])
    (own,) = host.read("start")
    change(own)
    assert type(own) is type(data)
    assert pickle.dumps(data) == before != pickle.dumps(own)


@pytest.mark.parametrize(("given", "shown"), [("nan", "nan"), ("an integer beyond floats", "10{59}")])
def test_a_reward_that_is_not_a_number_names_class_method_and_turn(host: Host, given: str, shown: str) -> None:
    session = Session(defined("games.Unrewarding"), host)
    session.begin([], {"start": 1})
    said = f"^`games.Unrewarding.step` at turn 4 gave the reward {shown}; give a finite number$"
    with pytest.raises(HostError, match=said):
        session.answer(spoken(given), turn=4)


def test_a_group_is_rewarded_as_a_whole(host: Host) -> None:
    group = [{"messages": [message("user", "?")] * count, "rewards": [], "row": {}, "seat": ""} for count in (3, 2, 4)]
    assert Session(defined("games.Ranked"), host).group_rewards(group) == [0.0, 1.0, 0.0]
    with pytest.raises(
        HostError, match=r"games.Miscounted.get_group_rewards` gave \[0.0\] for 3 conversations; give a"
    ):
        Session(defined("games.Miscounted"), host).group_rewards(group)


def test_an_environment_that_raises_says_so_in_one_line(host: Host) -> None:
    session = Session(defined("games.WordGame"), host)
    with pytest.raises(WorkerError, match=r"^`reset` raised KeyError.*'word'$"):
        session.begin(PROMPT, {"words": "house"})


def test_an_environment_that_never_returns_ends_by_its_limit() -> None:
    host = Worker(Limits(timeout_s=0.2))
    try:
        host.make("games.Endless")
        with pytest.raises(WorkerTimeout, match=r"`reset` took longer than 0\.2 s"):
            host.call("reset")
    finally:
        host.close()


@pytest.mark.parametrize(
    ("environment", "tools", "complaint"),
    [
        ("games.Unwritten", (), "has no public method for the policy to call, and no `initial_observation`"),
        ("games.Untold", (), r"tool `Untold.guess` has no schema \(.* it has no docstring!\); write a docstring"),
        ("games.Untyped", (), r"tool `Untyped.guess` has no schema \(Argument word is missing a type hint"),
        ("games.Dated", (), r"tool `Dated.guess` has no schema \(`day` is of type date, which JSON does not have\)"),
        ("games.Unbound", (), r"tool `Unbound.guess` has no schema \(\*words: .* is given without a name, or by any\)"),
        ("games.Undefined", (), r"tool `Undefined.guess` has no schema \(name 'Word' is not defined\); write"),
        ("games.WordGames", (), "`environment` is 'games.WordGames', but games has no WordGames. Did you mean"),
        ("game.WordGame", (), "there is no module game."),
        ("games.WordGame", (guess,), r"two tools have the name `guess`, `WordGame.guess` and `.*\.guess`; rename one"),
        (
            "games.CountDown",
            (guess,),
            "`games.CountDown` answers messages by `step`, so nothing would call the tools guess",
        ),
        (None, (lambda: None,), r"tool `.*<lambda>` is not a function at the top of a module"),
        (None, (partial(guess, "a"),), r"is not a function at the top of a module"),
        (None, ("games.subtract",), "`tools` has 'games.subtract', but games has no subtract"),
    ],
)
def test_what_is_not_an_environment_is_refused_in_one_line(
    environment: str | None, tools: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        defined(environment, tools)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (None, "gave a content of type 'image', and only text is read; give parts of type text"),
        ({"type": "text"}, "gave the part {'type': 'text'}, which has no text; give it one under `text`"),
        ({"type": "text", "text": 3}, "which has no text"),
        ("text", "gave a content of type 'str'"),
    ],
)
def test_a_part_that_is_not_text_is_a_failure_of_the_environment(part: Any, complaint: str) -> None:
    session = Session(defined("games.Pictures", arguments={"part": part}), InProcess())
    with pytest.raises(HostError) as refused:
        session.begin([], {"start": 3})
    said = str(refused.value)
    assert said.startswith("`games.Pictures.initial_observation` gave ")
    assert complaint in said


def test_a_refused_row_is_named_with_its_beginning() -> None:
    session = Session(defined("games.CountDown"), InProcess())
    with pytest.raises(UserError) as refused:
        session.begin([], {"begin": 3, "notes": "a" * 200})
    assert str(refused.value).endswith(
        "(the row is {'begin': 3, 'notes': '" + "a" * 77 + "...)"
    )  # 100 characters of it


def test_half_a_character_of_a_prompt_is_replaced() -> None:
    session = Session(defined("games.WordGame"), InProcess())
    began = session.begin([message("user", "Guess my \ud800.")], {"word": "house"})
    assert began == [message("user", "Guess my ?. It has 5 letters.")]


def test_a_row_that_reset_does_not_take_is_named_by_its_column() -> None:
    with pytest.raises(UserError, match=r"`games.CountDown.reset` takes `start`, .*it has begin"):
        defined("games.CountDown").given({"begin": 3})
