"""Random numbers that vLLM can take back on the CPU. See docs/design/0019.

A prompt that is prefilled in parts draws a token for each part, and vLLM then takes all draws but the last one back by
`generator.set_offset(generator.get_offset() - 4)`. Generators of the CPU have no offset.
"""

from __future__ import annotations

from typing import Any

import torch

TOKEN = 4  # by which vLLM moves the offset to take one token back


class RewindableGenerator(torch.Generator):
    """Goes back, by vLLM's arithmetic of offsets, to where it was when its request entered the batch.

    A request draws for parts of its prompt only between entering the batch and its next token, so that this is where
    every draw that is taken back began. It leaves the batch before more of its tokens are computed again.

    Attributes:
        rewinds: How often it went back.
    """

    rewinds: int = 0
    _entered: torch.Tensor

    def enter(self) -> None:
        """Remember this state."""
        self._entered = self.get_state()

    def get_offset(self) -> int:
        return TOKEN  # one token behind where it entered

    def set_offset(self, offset: int) -> torch.Generator:
        assert offset == 0, f"vLLM moves a generator to offset {offset}; it was tested to take one token back"
        self.rewinds += 1
        return self.set_state(self._entered)


def make_rewindable(runner: Any) -> None:
    """Give the requests of vLLM's model runner on the CPU such generators, as they enter its batch.

    It relies on `InputBatch.add_request(request)`, called when a request first enters the batch and when it enters it
    again after it was preempted, and on `request.generator` being the one that its tokens are drawn with.
    """
    add_request = runner.input_batch.add_request

    def add_rewindable(request: Any) -> Any:
        if request.generator is not None:
            if not isinstance(request.generator, RewindableGenerator):
                plain, request.generator = request.generator, RewindableGenerator()
                request.generator.set_state(plain.get_state())
            request.generator.enter()
        return add_request(request)

    runner.input_batch.add_request = add_rewindable
