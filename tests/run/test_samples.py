"""Which samples of a step are kept."""

from __future__ import annotations

import torch

from rlflow.controller.samples import Samples
from rlflow.databuffer.transport import Transport
from rlflow.environments.environment import defined
from rlflow.environments.host import InProcess
from rlflow.environments.session import Session
from rlflow.environments.template_bridge import TemplateBridge
from rlflow.models.tiny import tiny_tokenizer
from rlflow.rewards.reward import Scores
from rlflow.rollout import Completion
from rlflow.rollout.conversation import Conversation, to_rollout
from rlflow.values.path import RowPath
from rlflow.values.rollout import Ending


def double(number: int) -> int:
    """Double a number.

    Args:
        number: It.
    """
    return 2 * number


def test_conversations_whose_environment_failed_are_shown_first() -> None:
    rows, failed = 6, 4
    definition, bridge = defined(None, [double]), TemplateBridge(tiny_tokenizer())
    held = [Conversation(Session(definition, InProcess(), {}), bridge, [1], []) for _ in range(rows)]
    for place, conversation in enumerate(held):
        conversation.add_turn(Completion((5, 6), (0.0, 0.0), True))
        conversation.end(Ending.FAILED if place == failed else Ending.DONE, "so it is")
    held[failed].messages.append({"role": "user", "content": "?"})
    path = RowPath.of_groups(torch.arange(rows))
    rollout = to_rollout(held, path, [{}] * rows, 0, str, torch.float32)
    samples = Samples(Transport(), 0, str, lambda ids: f"read {ids}", lambda group: group + 100, 4)
    samples.keep(1, rollout, Scores([float(place) for place in range(rows)]))
    kept = samples.take(1)
    assert len(kept) == 4
    assert [each["row"] for each in kept] == [104, 100, 101, 102]
    assert [each["reward"] for each in kept] == [4, 0, 1, 2]
    assert [each["ended"] for each in kept] == ["failed", "done", "done", "done"]
    assert [each.get("read") for each in kept] == ["read [1]", None, None, None], "of conversations"
