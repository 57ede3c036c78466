"""Environments of other packages' forms answer as those of ours do."""

from __future__ import annotations

from typing import Any

import pytest

from rlflow import Environment
from rlflow.environments.bridge import ParsedTurn, message
from rlflow.environments.host import HostError, InProcess
from rlflow.environments.session import Session

SKY = "rlflow.environments.SkyRLGym"


def session(path: str, **arguments: Any) -> Session:
    return Session(Environment(path, arguments=arguments).definition_of({}), InProcess())


def test_a_gym_of_texts_is_reset_with_the_row_and_ends_when_it_says_so() -> None:
    lamp = session("rlflow.environments.TextGym", gym="games.Lamp", options={"tries": 3})
    row = {"seed": 7, "room": "hall"}
    assert lamp.begin([], row) == [message("user", "dark 7 hall")]
    first = lamp.answer(ParsedTurn("off"), 0)
    assert (first.messages, first.reward, first.done) == ([message("user", "dark")], 0.0, False)
    second = lamp.answer(ParsedTurn("on"), 1)
    assert (second.messages, second.reward, second.done) == ([], 1.0, True)


def test_a_gym_that_is_cut_is_over() -> None:
    lamp = session("rlflow.environments.TextGym", gym="games.Lamp", options={"tries": 1})
    lamp.begin([], {"room": "hall"})
    assert lamp.answer(ParsedTurn("off"), 0).done


@pytest.mark.parametrize("gym", ["games.Sky", "games.Appending"])
def test_an_environment_of_skyrl_s_form_is_made_with_the_row(gym: str) -> None:
    sky = session(SKY, gym=gym, config={"bonus": 0.5}, prompt="question")
    prompt = [message("user", "2 + 2?")]
    assert sky.begin(prompt, {"question": prompt, "answer": "4"}) == [*prompt, message("user", "Think.")]
    first = sky.answer(ParsedTurn("3"), 0)
    assert (first.messages, first.reward, first.done) == ([message("user", "no")], 0.5, False)
    second = sky.answer(ParsedTurn("4"), 1)
    assert (second.messages, second.reward, second.done) == ([], 1.5, True)


def test_a_prompt_that_skyrl_s_form_rewrites_is_refused_in_one_line() -> None:
    forgetful = session(SKY, gym="games.Forgetful", config={"bonus": 0}, prompt="question")
    with pytest.raises(HostError, match=r"Forgetful.init changed the prompt, .* let it add messages alone"):
        forgetful.begin([], {"question": "2 + 2?", "answer": "4"})
