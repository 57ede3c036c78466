"""What nodes give the module's memories of prompts, until the step is over and all ranks learn it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.databuffer.transport import Transport
from rlflow.state.prompt_memory import PromptMemory

_NUMBERS = 6  # that are gathered of each row: draw, place of the node, call, its own place, prompt, the number itself


@dataclass(frozen=True)
class Remembered:
    """What one call of a node gave a memory of this rank's rows.

    Attributes:
        memory: Its name.
        node: The node's id.
        draw: At which the node ran.
        call: Which of the node's calls for this memory, from 0.
        rows: `[3, B]` float64: the rows' places in the order of all, their prompts' places in the dataset, the numbers.
    """

    memory: str
    node: str
    draw: int
    call: int
    rows: Tensor

    def keyed(self, place: int) -> Tensor:
        """`[6, B]`: by what the rows are ordered, the node's place in the graph among it; then prompts and numbers."""
        keys = self.rows.new_tensor([self.draw, place, self.call])[:, None].expand(3, self.rows.shape[1])
        return torch.cat([keys, self.rows])


class MemoryUpdates:
    """What this rank's nodes gave memories, by step.

    Args:
        transport: To the other ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._given: dict[int, list[Remembered]] = {}

    def add(self, memory: str, step: int, node: str, draw: int, rows: Tensor) -> None:
        """What a call of a node gave a memory; `rows` as in `Remembered`."""
        of_step = self._given.setdefault(step, [])
        call = sum((each.memory, each.node, each.draw) == (memory, node, draw) for each in of_step)
        of_step.append(Remembered(memory, node, draw, call, rows))

    def learn(self, memories: Mapping[str, PromptMemory], nodes: Sequence[str], step: int) -> None:
        """Let memories learn what all ranks' nodes gave in a step; by all ranks.

        The order is that of draws, of nodes, of a node's calls, and of the rows' paths: alike on any number of ranks.

        Args:
            memories: By name.
            nodes: All of the graph, in its order.
            step: Whose nodes they were.
        """
        here = self._given.pop(step, [])
        for name, memory in memories.items():
            parts = [each.keyed(nodes.index(each.node)) for each in here if each.memory == name]
            mine = torch.cat([torch.zeros(_NUMBERS, 0, dtype=torch.float64), *parts], dim=1)
            ranks = self._transport.all_gather_ragged(mine.flatten())
            rows = torch.cat([each.cpu().view(_NUMBERS, -1) for each in ranks], dim=1)
            *keys, prompts, x = range(_NUMBERS)
            for key in reversed(keys):
                rows = rows[:, rows[key].argsort(stable=True)]
            memory.learn(rows[prompts].long(), rows[x])

    def of_later_steps(self, step: int) -> list[dict[str, Any]]:
        """What is to be learned of steps after `step`, JSON-able: these are in progress."""
        return [
            {"step": later, **vars(each), "rows": each.rows.tolist()}
            for later, of_step in self._given.items()
            for each in of_step
            if later > step
        ]

    def restore(self, later_steps: Sequence[Mapping[str, Any]]) -> None:
        """Take back what `of_later_steps` gave."""
        for stored in later_steps:
            given = {name: x for name, x in stored.items() if name != "step"}
            given["rows"] = torch.tensor(stored["rows"], dtype=torch.float64).view(3, -1)
            self._given.setdefault(stored["step"], []).append(Remembered(**given))
