"""`add_group_rewards`: what the conversations from one row get beside one another, when all are over."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from rlflow.environments.host import HostError
from rlflow.environments.session import EnvironmentSession
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.conversation_loop import ConversationSteps, EnvironmentCall
from rlflow.rollout.conversation_turns import Rules, fail


def add_group_rewards(
    session: EnvironmentSession, group: Sequence[Conversation], row: dict[str, Any], rules: Rules
) -> ConversationSteps[None]:
    """Ask the environment for the rewards of a group, and add them to the last turns.

    Args:
        session: Of the group's environment, on a host that no conversation uses.
        group: Conversations from one row; none of them failed.
        row: Of the dataset.
        rules: How they went.

    Raises:
        UserError: The environment failed, where that ends the run; or gave something other than numbers.
    """
    seats = session.seats or ("",)
    given = [
        {"messages": each.messages, "rewards": each.rewards, "row": row, "seat": seats[each.seat]} for each in group
    ]
    rewards = yield EnvironmentCall(partial(session.group_rewards, deepcopy(given)))  # which an environment may change
    for number, conversation in enumerate(group):
        if isinstance(rewards, HostError):
            fail(conversation, rewards, rules)
        else:
            conversation.rewards[-1] += rewards[number]
