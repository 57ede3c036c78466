"""The message to the policy about a call that was cut off at the longest turn."""

from __future__ import annotations

import pytest

from rlflow.environments.bridge import ParsedTurn
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.environments.tool_calls import ToolCall
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rollout import Completion
from rlflow.rollout.conversation import Conversation, _reply


def double(number: int) -> int:
    """Double a number.

    Args:
        number: It.
    """
    return 2 * number


@pytest.mark.parametrize(("finished", "told"), [(True, "no JSON"), (False, "no JSON (the turn was cut at 3 tokens)")])
def test_the_error_of_a_call_says_that_its_turn_was_cut(finished: bool, told: str) -> None:
    session = Session(defined(None, [double]), InProcess(), {})
    conversation = Conversation(session, TemplateBridge(tiny_tokenizer()), [1], [])
    conversation.add_turn(Completion((5, 6, 7), (0.0,) * 3, finished))
    calls = (ToolCall("", {}, "no JSON"), ToolCall("double", {"number": 2}))
    reply = _reply(conversation, ParsedTurn("", calls))
    assert [each["content"] for each in reply["messages"]] == [told, "4"]
    assert (reply["calls"], reply["failed"]) == (2, 1)
