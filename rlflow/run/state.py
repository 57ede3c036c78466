"""What a run remembers between two steps, apart from weights and optimizers: all that a checkpoint has of it."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from rlflow import checkpoint
from rlflow.callbacks.hooks import Callbacks
from rlflow.checkpoint import Progress
from rlflow.checkpoint.stored_groups import read_groups
from rlflow.controller import Controller
from rlflow.controller.run import Run
from rlflow.dag.tasks import Load
from rlflow.databuffer.groups import Groups
from rlflow.errors import UserError
from rlflow.metrics import Metrics
from rlflow.module import RLModule
from rlflow.run.agreement import gather
from rlflow.state.tensors import digest, with_tensors, without_tensors


@dataclass(frozen=True)
class Snapshot:
    """What one rank remembers after some steps. Nothing of it changes, so it can be saved in the middle of the next.

    Where it lies in a checkpoint:

        progress   state.json, written by rank 0 with what all ranks know together
        tensors    module-state-<rank>-of-<ranks>.safetensors, each tensor once
        of_rank    logged-<rank>-of-<ranks>.json
        groups     surplus*, unfinished*, step-<n>*

    Weights and optimizers are no part of it; they are written from where they lie, see `rlflow.checkpoint.writing`.

    Attributes:
        progress: Where the run stands, as this rank knows it; see `RunState.agreed`.
        tensors: Tensors of the module's state, by the keys that lead to them.
        of_rank: What this rank alone has: what it logged and was given of steps in progress, and its random
            generators' states; JSON-able.
        groups: Rows and values of later steps, by name.
    """

    progress: Progress
    tensors: Mapping[str, Tensor]
    of_rank: Mapping[str, Any]
    groups: Mapping[str, Groups]

    @property
    def done(self) -> int:
        """Steps that are done."""
        return self.progress.step


class RunState:
    """Takes snapshots of a run on one rank, and brings the run back to one.

    Args:
        run: The run on this rank.
        controller: Runs the steps.
        metrics: Metrics of this rank.
        callbacks: Callbacks of the user.

    Attributes:
        before: Validation before the first step of all.
        monitored: The metric that decides which checkpoints stay, by its name; empty where none does.
    """

    def __init__(self, run: Run, controller: Controller, metrics: Metrics, callbacks: Callbacks) -> None:
        self.before: dict[str, float] = {}
        self.monitored: dict[str, float] = {}
        self._run = run
        self._controller = controller
        self._metrics = metrics
        self._callbacks = callbacks
        self._module = ModuleState(run.module, run.rank, partial(gather, run.transport))

    def take(self, done: int) -> Snapshot:
        """After `done` steps; asks no other rank."""
        run, controller, chosen = self._run, self._controller, self._run.train.chosen
        later = self._metrics.of_later_steps(done - 1)
        of_rank = {"metrics": later, "samples": run.samples.of_later_steps()} if later else {}
        if remembered := run.context.memories.of_later_steps(done - 1):
            of_rank |= {"remembered": remembered}
        states = random_states(run.strategy.root_device)
        of_rank |= {"random": {"of": [run.rank, run.transport.world_size], "states": states}}
        rest, tensors = self._module.here()
        progress = Progress(
            step=done,
            version=controller.policies.version_after(run.follows, done),
            seed=run.settings.seed,
            data=run.train.scan.digest,
            draws=controller.draws,
            before=self.before,
            module=rest,
            callbacks=self._callbacks.state_dict(),
            chosen=None if chosen is None else chosen.state_dict(),
            prompts_per_step=run.data.prompts_per_step,
            history=controller.history,
            config=None if run.config is None else dict(run.config),
            monitored=self.monitored,
        )
        return Snapshot(progress, tensors, copy.deepcopy(of_rank), controller.carried_over(done))

    def agreed(self, here: Snapshot) -> Snapshot:
        """This rank's snapshot, with what all ranks together know and the tensors that it is to write; by all ranks.

        Raises:
            UserError: Ranks have other tensors of the module's state.
        """
        run, progress = self._run, here.progress
        module, tensors = self._module.taken(progress.module, here.tensors)
        updates = {role: of for role, of in progress.history["updates"].items() if run.strategy.holds(role)}
        updates = {role: of for of_rank in gather(run.transport, updates) for role, of in of_rank.items()}
        chosen = progress.chosen
        if chosen is not None:  # as the first rank has it that loads prompts
            loads = next(task.ranks[0] for task in run.plan.every() if isinstance(task, Load))
            chosen = gather(run.transport, chosen if run.rank == loads else None)[loads]
        history = {"updates": updates, "gaps": progress.history["gaps"]}
        return replace(here, progress=replace(progress, module=module, history=history, chosen=chosen), tensors=tensors)

    def restore(self, folder: Path, progress: Progress) -> list[str]:
        """Bring the run to where a checkpoint was taken; by all ranks, whose roles are loaded.

        Args:
            folder: Folder of the checkpoint.
            progress: What it says.

        Returns:
            A line for each callback that has lost its state, or begins without one.
        """
        run, controller, device = self._run, self._controller, self._run.strategy.root_device
        self.before, self.monitored = progress.before, progress.monitored
        checkpoint.restore(folder, run.strategy, run.stateful)
        run.module.load_state_dict(with_tensors(progress.module, checkpoint.read_module_tensors(folder)))
        if run.train.chosen is not None:
            run.train.chosen.load_state_dict(progress.chosen or [])
        lines = self._callbacks.load_state_dict(progress.callbacks)
        controller.restore(progress.step, progress.draws, lambda name, like: read_groups(folder, name, like, device))
        controller.restore_history(progress.history)
        for of_rank in checkpoint.read_of_rank(folder, run.rank, run.transport.world_size):
            self._metrics.log_again(of_rank.get("metrics", ()))
            run.samples.keep_again(of_rank.get("samples", []))
            run.context.memories.restore(of_rank.get("remembered", ()))
            if of_rank["random"]["of"] == [run.rank, run.transport.world_size]:  # those of other ranks nobody continues
                restore_random_states(of_rank["random"]["states"], device)
        return lines

    def begin(self) -> None:
        """The first step of this run begins: what changes of the module from now on was changed by the run."""
        self._module.begin()


class ModuleState:
    """The state of a run's module.

    Args:
        module: The same on all ranks, but for entries that change on the ranks alone that run their node.
        rank: This rank.
        gather: Gathers what is JSON-able of every rank; a collective of all.
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
