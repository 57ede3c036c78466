"""The metrics of conversations, under the name of the node that had them."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.metrics import StepMetrics
from rlflow.rollout.conversation import Conversation
from rlflow.rollout.conversation_loop import ConversationTimes
from rlflow.values.rollout import Ending


def measure_conversations(
    node_id: str,
    conversations: Sequence[Conversation],
    times: ConversationTimes,
    metrics: StepMetrics,
    cut_off: bool = False,
) -> None:
    """Turns, calls of tools, who wrote how much, time of environments, and why conversations ended; of this rank's.

    Args:
        node_id: The node.
        conversations: Those that ended in this call are counted.
        times: Of all.
        metrics: Of the step.
        cut_off: Whether some may be cut off and continued.
    """
    if cut_off:
        metrics.sum(f"{node_id}/begun_anew", float(sum(each.begun_anew for each in conversations)))
        conversations = [each for each in conversations if each.ended is not None and not each.was_over]
    measure_turns(node_id, conversations, metrics)
    count = float(len(conversations))
    ends = [each.ended for each in conversations]
    written = sum(sum(each.segments[::2]) for each in conversations)  # those that are left out of the loss, too
    metrics.mean(f"{node_id}/written", float(written), float(sum(len(each.tokens) for each in conversations)))
    metrics.mean(f"{node_id}/environment_seconds", sum(times.calls), float(times.count))
    metrics.mean(f"{node_id}/environment_wait", times.idle, times.whole)
    metrics.mean(f"{node_id}/ended_done", float(ends.count(Ending.DONE)), count)
    metrics.mean(f"{node_id}/ended_turns", float(ends.count(Ending.TURNS)), count)
    metrics.mean(f"{node_id}/ended_tokens", float(ends.count(Ending.TOKENS)), count)
    metrics.mean(f"{node_id}/ended_failed", float(ends.count(Ending.FAILED)), count)


def measure_turns(node_id: str, conversations: Sequence[Conversation], metrics: StepMetrics) -> None:
    """Turns, and calls of tools; of this rank's."""
    count = float(len(conversations))
    calls = float(sum(each.calls for each in conversations))
    metrics.mean(f"{node_id}/turns", float(sum(each.turns for each in conversations)), count)
    metrics.mean(f"{node_id}/tool_calls", calls, count)
    metrics.mean(f"{node_id}/tool_errors", float(sum(each.failed for each in conversations)), calls)
