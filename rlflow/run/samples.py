"""Some samples of each step, for the loggers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rlflow.databuffer.message import from_message, to_message
from rlflow.databuffer.transport import Transport
from rlflow.rewards.reward import Scores
from rlflow.values.host_copy import on_host
from rlflow.values.protocols import Written
from rlflow.values.ragged import Ragged

SAMPLES_PER_STEP = 4


class Samples:
    """Kept by the first rank that generates, and brought to rank 0, whose loggers write them.

    Args:
        transport: To the other ranks; has formed the group of `group`.
        speaker: The rank that keeps samples.
        decode: Token ids to text.
    """

    def __init__(self, transport: Transport, speaker: int, decode: Callable[[Sequence[int]], str]) -> None:
        self.group = tuple(sorted({0, speaker}))
        self._transport = transport
        self._speaker = speaker
        self._decode = decode
        self._steps: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def keep(self, step: int, rollout: Written, scores: Scores) -> None:
        """Keep some of these, on the rank that does."""
        if self._transport.rank != self._speaker:
            return
        samples, prompts = self._steps[step], rollout.prompt_ids
        rows = Ragged(on_host(prompts.values), on_host(prompts.lengths)).rows()
        for i, prompt in enumerate(rows[: SAMPLES_PER_STEP - len(samples)]):
            parts = {name: part[i] for name, part in scores.parts.items()}
            reward = {"reward": scores.total[i], "parts": parts}
            samples.append({"prompt": self._decode(prompt.tolist()), "response": rollout.texts[i], **reward})

    def take(self, step: int) -> list[dict[str, Any]]:
        """What was kept of a step, on rank 0; all ranks call it."""
        samples = self._steps.pop(step, [])
        if self._speaker == 0 or self._transport.rank not in self.group:
            return samples
        speaks = self._transport.rank == self._speaker
        message = to_message(json.dumps(samples).encode()) if speaks else None
        heard = self._transport.broadcast_bytes(message, self._speaker, self.group)
        read: list[dict[str, Any]] = json.loads(from_message(heard))
        return read

    def of_later_steps(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """What was kept of steps that are under way, by step, JSON-able."""
        return list(self._steps.items())

    def keep_again(self, later_steps: Sequence[tuple[int, list[dict[str, Any]]]]) -> None:
        """Keep what `of_later_steps` gave."""
        self._steps.update(dict(later_steps))
