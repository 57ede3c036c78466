"""Some samples of each step, for the loggers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.transport import Transport
from rlflow.rewards.reward import Scores
from rlflow.values.host_copy import on_host
from rlflow.values.protocols import WithTexts
from rlflow.values.rollout import Ending


class Samples:
    """Samples for the loggers. The first rank that generates collects them; rank 0 receives them and logs them.

    Args:
        transport: Transport to the other ranks, on which the process group of `group` was formed.
        speaker: The rank that collects samples.
        decode: Converts token ids to text, without special tokens.
        decode_with_special: Converts token ids to text, with special tokens.
        rows_of: Converts ids of prompts to their row numbers in the dataset.
        most: Number of samples that are collected of a step.
        picture_names: Names of the pictures of a row of the dataset.
    """

    def __init__(
        self,
        transport: Transport,
        speaker: int,
        decode: Callable[[Sequence[int]], str],
        decode_with_special: Callable[[Sequence[int]], str],
        rows_of: Callable[[Tensor], Tensor],
        most: int,
        picture_names: Callable[[dict[str, Any]], list[str]] = lambda row: [],
    ) -> None:
        self.group = tuple(sorted({0, speaker}))
        self._transport = transport
        self._speaker = speaker
        self._decode = decode
        self._decode_with_special = decode_with_special
        self._rows_of = rows_of
        self._most = most
        self._picture_names = picture_names
        self._steps: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)

    def keep(self, step: int, rollout: WithTexts, scores: Scores) -> None:
        """Collect some samples of a rollout, those of a tree together; other ranks than `speaker` do nothing."""
        if self._transport.rank != self._speaker:
            return
        samples, prompts = self._steps[step], rollout.prompt_ids.on_host().rows()
        of_parents, turns, ended = (on_host(x).tolist() for x in (rollout.index, rollout.turns, rollout.ended))
        trees = Trees.of(rollout)
        failed_first = sorted(range(len(prompts)), key=lambda i: (ended[i] != Ending.FAILED, trees.paths[i]))
        kept = failed_first[: self._most - len(samples)]
        places = dict(zip(kept, self._rows_of(on_host(rollout.path.root)[kept]).tolist(), strict=True))
        for i in kept:
            pictures = self._picture_names(rollout.rows[i])
            samples.append(
                {
                    "row": places[i],
                    "sample": of_parents[i],
                    "prompt": self._decode(prompts[i].tolist()),
                    "response": rollout.texts[i],
                    "reward": scores.total[i],
                    "failed": scores.failed.get(i),
                    "parts": {name: part[i] for name, part in scores.parts.items()},
                    "turns": turns[i],
                    "ended": Ending(ended[i]).name.lower(),
                    "messages": rollout.messages[i],
                }
                | ({"columns": {name: _json(of[i]) for name, of in scores.columns.items()}} if scores.columns else {})
                | ({"pictures": pictures} if pictures else {})
                | ({"read": self._decode_with_special(prompts[i].tolist())} if rollout.messages[i] else {})
                | trees.place(i, self._decode)
            )

    def take(self, step: int) -> list[dict[str, Any]]:
        """The samples that were collected for a step, on rank 0; all ranks call it."""
        samples = self._steps.pop(step, [])
        if self._speaker == 0 or self._transport.rank not in self.group:
            return samples
        sent: list[dict[str, Any]] = self._transport.broadcast_json(samples, self._speaker, self.group)
        return sent

    def state_dict(self) -> dict[str, Any]:
        """The samples of steps in progress, JSON-able."""
        return {"steps": list(self._steps.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add the samples that `state_dict` returned; called for each rank's state if this rank gets several."""
        self._steps.update(dict(state["steps"]))


@dataclass(frozen=True)
class Trees:
    """Relations between the samples of a rank: leaves of one trunk, or rows of one agent's episode.

    Attributes:
        rollout: The samples.
        paths: Path of each sample, from its prompt.
        branches: Number of each sample among the rows of its episode.
        inherited: Number of the first tokens of each sample that are of another row.
    """

    rollout: WithTexts
    paths: list[list[int]]
    branches: list[int]
    inherited: list[int]

    @classmethod
    def of(cls, rollout: WithTexts) -> Trees:
        """The trees of these samples."""
        return cls(rollout, *(on_host(x).tolist() for x in (rollout.path.numbers, rollout.branch, rollout.inherited)))

    def place(self, row: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """The logged place of a sample in a tree; nothing if it answers a prompt by itself."""
        found = dict[str, Any]()
        if len(self.paths[row]) > 2:
            found["path"] = _below_prompt(self.paths[row])
        if self.branches[row]:
            found["episode"] = _below_prompt(self._episode(row))
        if (tokens := self.inherited[row]) and (earlier := self._earlier(row)) is not None:
            found["continues"] = {"sample": _below_prompt(earlier), "tokens": tokens}
            if not self.rollout.messages[row]:  # a conversation shows messages
                found["continues"]["text"] = decode(self.rollout.response_ids[row, :tokens].tolist())
        return found

    def _earlier(self, row: int) -> list[int] | None:
        """The path of the first sample of the same trunk or episode that begins with the tokens `row` inherits."""
        prompts, ids, tokens = self.rollout.prompt_ids.rows(), self.rollout.response_ids, self.inherited[row]
        alike = (
            path
            for other, path in enumerate(self.paths)
            if path < self.paths[row]
            and self._episode(other) == self._episode(row)
            and torch.equal(prompts[other], prompts[row])
            and torch.equal(ids[other, :tokens], ids[row, :tokens])
        )
        return min(alike, default=None)

    def _episode(self, row: int) -> list[int]:
        """The path of the first row of an agent's episode; for leaves, the path of their trunk."""
        *above, number = self.paths[row]
        continues = self.inherited[row] > 0 and self.branches[row] == 0
        return above if continues else [*above, number - self.branches[row]]


def _below_prompt(path: Sequence[int]) -> str:
    """The numbers of a path without the prompt's id: `2.1` is the second row below the third one."""
    return ".".join(map(str, path[1:]))


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
