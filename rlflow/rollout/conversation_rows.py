"""Conversations as rows of a `Rollout`, and back where they were cut off.

What the other columns do not say stands in `Rollout.progress`, of each row: whether it is `over`; `draw`, how often
prompts were drawn before it began; `rewards` of its turns, `calls` of tools, how many `failed`, `why` it is over,
whether the last turn was `cut` at its longest length; and `state` of the environment, null where it has none to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlflow.environments.bridge import Bridge
from rlflow.environments.session import EnvironmentSession
from rlflow.rollout.conversation import Conversation
from rlflow.values.path import RowPath
from rlflow.values.ragged import Ragged
from rlflow.values.rollout import Ending, Rollout


def to_rollout(
    conversations: Sequence[Conversation],
    path: RowPath,
    rows: Sequence[dict[str, Any]],
    version: int,
    decode: Callable[[Sequence[int]], str],
    dtype: torch.dtype,
    cut_off: bool = False,
) -> Rollout:
    """Conversations as far as they got, on the CPU.

    Args:
        conversations: `B` of them.
        path: Of each.
        rows: The dataset's row of each.
        version: Of the policy, of tokens whose version a conversation does not say.
        decode: Token ids to text, of what the policy said last.
        dtype: Of log-probabilities and rewards.
        cut_off: Whether some may be continued.
    """
    lengths = torch.tensor([len(each.tokens) for each in conversations], dtype=torch.int64)
    ids = _padded([each.tokens for each in conversations], torch.int64)
    rewards = [reward for each in conversations for reward in each.rewards]
    versions = [[*each.versions, *[version] * (len(each.tokens) - len(each.versions))] for each in conversations]
    ended = torch.tensor([Ending.TOKENS if each.ended is None else each.ended for each in conversations]).long()
    return Rollout(
        prompt_ids=Ragged.from_lists([each.prompt for each in conversations]),
        response_ids=ids,
        loss_mask=_padded([each.written for each in conversations], torch.bool),
        lengths=lengths,
        logprobs=_padded([each.logprobs for each in conversations], dtype),
        finished=ended != Ending.TOKENS,
        path=path,
        version=torch.tensor([each[0] if each else version for each in versions]).long(),  # versions only grow
        versions=_padded(versions, torch.int32),
        inherited=torch.zeros_like(lengths),
        experts=Ragged(torch.zeros(0, dtype=torch.uint8), torch.zeros_like(lengths)),
        segments=Ragged.from_lists([each.segments for each in conversations]),
        turn_rewards=Ragged(
            torch.tensor(rewards, dtype=dtype), torch.tensor([len(each.rewards) for each in conversations]).long()
        ),
        ended=ended,
        seat=torch.tensor([each.seat for each in conversations]).long(),
        texts=[decode(each.last_turn) for each in conversations],
        messages=[_messages(each) for each in conversations],
        rows=list(rows),
        progress=[_progress(each) if cut_off else {} for each in conversations],
    )


def from_rollout(rollout: Rollout, row: int, session: EnvironmentSession, bridge: Bridge) -> Conversation:
    """The conversation of a row that may be cut off, to be continued or as it ended.

    Args:
        rollout: What `to_rollout` gave, on the CPU.
        row: Of it.
        session: Of the conversation's environment.
        bridge: Writes its turns.
    """
    progress, length = rollout.progress[row], int(rollout.lengths[row])
    segments = rollout.segments.rows()[row].tolist()
    written = rollout.loss_mask[row, :length].tolist()
    if not progress["over"]:  # the mask may leave out what is not finished
        written = [turn % 2 == 0 for turn, count in enumerate(segments) for _ in range(count)]
    return Conversation(
        session,
        bridge,
        prompt=rollout.prompt_ids.rows()[row].tolist(),
        messages=list(rollout.messages[row]),
        tokens=rollout.response_ids[row, :length].tolist(),
        logprobs=rollout.logprobs[row, :length].tolist(),
        written=written,
        segments=segments,
        rewards=list(progress["rewards"]),
        ended=Ending(int(rollout.ended[row])) if progress["over"] else None,
        why=progress["why"],
        cut=progress["cut"],
        seat=int(rollout.seat[row]),
        calls=progress["calls"],
        failed=progress["failed"],
        turn_open=not progress["over"] and len(segments) % 2 == 1,  # segments are turns and answers, one after another
        versions=rollout.versions[row, :length].tolist(),
        draw=progress["draw"],
        state=progress["state"],
        was_over=progress["over"],
    )


def _progress(conversation: Conversation) -> dict[str, Any]:
    return {
        "over": conversation.ended is not None,
        "draw": conversation.draw,
        "rewards": conversation.rewards,
        "calls": conversation.calls,
        "failed": conversation.failed,
        "why": conversation.why,
        "cut": conversation.cut,
        "state": conversation.state,
    }


def _messages(conversation: Conversation) -> list[dict[str, Any]]:
    """What was said, with the rewards of the policy's turns, and why it is over.

    A seat that never spoke has a reward, and no message of its own for it.
    """
    messages = [dict(each) for each in conversation.messages]
    if conversation.ended is None:
        return messages
    spoken = [each for each in messages if each["role"] == "assistant"]  # examples in a prompt come before turns
    rewards = conversation.rewards if conversation.tokens else []
    for each, reward in zip(reversed(spoken), reversed(rewards), strict=False):
        each["reward"] = reward
    if messages:
        messages[-1]["ended"] = conversation.why
    return messages


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """`[B, T]`, right-padded with 0."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype).view(len(rows), longest)
