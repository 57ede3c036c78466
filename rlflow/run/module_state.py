"""What a module keeps from step to step, on its way into checkpoints and back: of many ranks, once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.state.tensors import digest, with_tensors, without_tensors


class ModuleState:
    """The state of a run's module.

    Args:
        module: The same on all ranks, but for entries that change on the ranks alone that run their node.
        rank: This one.
        gather: What is JSON-able, of every rank; a collective of all.
    """

    def __init__(self, module: RLModule, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        self._module = module
        self._rank = rank
        self._gather = gather
        self._before: dict[str, Any] = {}
        self._tensors_before: dict[str, str] = {}  # their digests

    def begin(self) -> None:
        """What changes from now on was changed by the run."""
        rest, tensors = without_tensors(self._module.state_dict())
        self._before = json.loads(json.dumps(rest))  # a copy, as a checkpoint gives it back
        self._tensors_before = {name: digest(tensor) for name, tensor in tensors.items()}

    def here(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Copies of what this rank has: what is JSON-able, and the tensors."""
        rest, tensors = without_tensors(self._module.state_dict())
        memories = self._module.memories()
        if self._rank != 0:  # what is remembered of prompts is the same on all ranks, and may be long
            rest = {name: state for name, state in rest.items() if name not in memories}
        return {name: x if name in memories else copy.deepcopy(x) for name, x in rest.items()}, tensors

    def taken(self, here: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Each entry as the ranks have it that changed it: those that run the node that it belongs to; by all ranks.

        Args:
            here: What is JSON-able of this rank's, see `here`.
            tensors: Likewise.

        Returns:
            What is JSON-able, of all ranks; and the tensors that this rank is to write.

        Raises:
            UserError: Ranks changed a tensor to different ones.
        """
        digests = {name: digest(tensor) for name, tensor in tensors.items()}
        every: list[dict[str, Any]] = self._gather({"rest": dict(here), "tensors": digests})
        states: list[dict[str, Any]] = [of["rest"] for of in every]
        names = dict.fromkeys(name for state in states for name in state)
        of_ranks = {name: [state[name] for state in states if name in state] for name in names}
        state = {
            name: next((value for value in values if value != self._before.get(name)), values[0])
            for name, values in of_ranks.items()
        }
        return state, self._to_write(tensors, [of["tensors"] for of in every])

    def _to_write(self, tensors: Mapping[str, Tensor], digests: list[dict[str, str]]) -> dict[str, Tensor]:
        """The tensors of which this rank is the first that changed them, or where none did, the first that has them."""
        written = {}
        for name in dict.fromkeys(name for of_rank in digests for name in of_rank):
            having = {rank: of_rank[name] for rank, of_rank in enumerate(digests) if name in of_rank}
            changed = {rank: found for rank, found in having.items() if found != self._tensors_before.get(name)}
            first = next(iter(changed or having))
            for rank, found in changed.items():
                if found != changed[first]:
                    raise UserError(
                        f"`{name}` of the module's state is one tensor on rank {first} and another on rank {rank}, and"
                        " a checkpoint has one; change it from what all ranks know, as `all_rows` and `mean` give it"
                    )
            if first == self._rank:
                written[name] = tensors[name]
        return written


def restore_module(module: RLModule, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give a module back what all ranks' `ModuleState.taken` gave."""
    module.load_state_dict(with_tensors(rest, tensors))
