"""Where a run stands between two steps, apart from weights and optimizers."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller import Controller
from rlflow.controller.run import Run
from rlflow.databuffer.kept import Kept
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.state.tensors import digest, with_tensors, without_tensors


@dataclass(frozen=True)
class Standing:
    """Of one rank. Nothing of it changes afterwards, so it can be saved in the middle of the next step.

    Attributes:
        done: Steps.
        draws: How often prompts were drawn.
        history: See `Controller.history`.
        callbacks: The callbacks' states, by `Callback.state_key`.
        chosen: The rows of epochs that the module chose; None where it does not choose.
        module: The module's own state, without its tensors.
        tensors: These, by the keys that lead to them.
        logged: What was logged and is remembered of steps in progress, and the random generators' states; JSON-able.
        kept: Rows and values of later steps, by name.
    """

    done: int
    draws: int
    history: Mapping[str, Mapping[str, Any]]
    callbacks: Mapping[str, Mapping[str, Any]]
    chosen: list[dict[str, Any]] | None
    module: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    logged: Mapping[str, Any]
    kept: Mapping[str, Kept]

    @classmethod
    def of(
        cls,
        done: int,
        controller: Controller,
        run: Run,
        metrics: Metrics,
        callbacks: Callbacks,
        module: ModuleState,
    ) -> Standing:
        """After `done` steps; asks no other rank."""
        later = metrics.of_later_steps(done - 1)
        logged = {"metrics": later, "samples": run.samples.of_later_steps()} if later else {}
        if remembered := run.context.memories.of_later_steps(done - 1):
            logged |= {"remembered": remembered}
        of, states = run.transport, random_states(run.strategy.root_device)
        logged |= {"random": {"of": [of.rank, of.world_size], "states": states}}
        chosen, (rest, tensors) = run.train.chosen, module.here()
        return cls(
            done=done,
            draws=controller.draws,
            history=controller.history,
            callbacks=callbacks.state_dict(),
            chosen=None if chosen is None else chosen.state_dict(),
            module=rest,
            tensors=tensors,
            logged=copy.deepcopy(logged),
            kept=controller.kept(done),
        )


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


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's own generators, JSON-able.

    Args:
        device: Of the rank; a GPU's generator is among them.
    """
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], place, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_states` gave."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    torch.set_rng_state(_from_text(states["torch"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(states["cuda"]), device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
