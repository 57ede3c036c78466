"""The contents of a checkpoint, taken and restored: weights and optimizers of roles, and the states of other parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from rlflow.checkpoint.manifest import Progress, digest_of
from rlflow.checkpoint.reading import read_module_tensors, read_of_rank, restore
from rlflow.checkpoint.stored_groups import read_groups
from rlflow.databuffer.groups import Groups, ReadGroups
from rlflow.errors import UserError
from rlflow.module import RLModule
from rlflow.state.tensors import digest, with_tensors, without_tensors
from rlflow.strategies.strategy import TrainingStrategy

ADDED = "on_save_checkpoint."  # how the names begin of what the module's hook added to its state


@dataclass(frozen=True)
class Snapshot:
    """State of one rank between two steps, without weights and optimizers. It does not change during the next step.

    So it can be written while the next step runs. Weights and optimizers are written straight from the strategy.

    Attributes:
        progress: Progress of the run, for `state.json`, which rank 0 writes.
        tensors: Tensors of the module's state, by the keys that lead to them, for this rank's `module-state-*`.
        of_rank: State of this rank alone, JSON-able, for its file `logged-*`.
        groups: Groups that later steps need, by the beginning of their file names, such as `surplus`.
    """

    progress: Progress
    tensors: Mapping[str, Tensor]
    of_rank: Mapping[str, Any]
    groups: Mapping[str, Groups]


class StatefulPart(Protocol):
    """A part of a run that has a state, which is JSON-able."""

    def state_dict(self) -> Any:
        """The state now."""

    def load_state_dict(self, state: Any) -> list[str] | None:
        """Restore what `state_dict` returned; returns lines to show to the user, if there are any."""


@dataclass(eq=False)
class Checkpoint:
    """The parts of a run, on one rank, whose states make up a checkpoint; it takes these states and restores them.

        snapshot = parts.take()                     between two steps
        saving.save(parts.agreed(snapshot))         by all ranks
        parts.restore(folder, progress)             by all ranks of the run that resumes

    Every part has a name. The part `module` is treated like those of `changed`.

    Attributes:
        strategy: Strategy that holds the weights and optimizers of this rank's roles.
        roles: Names of the roles that are trained, and of averages of them.
        module: The algorithm. Its `state_dict` has coefficients, memories of prompts, replay buffers and the like.
        changed: Parts that only some ranks change. The checkpoint has each entry of such a state as it is on the first
            rank that changed it since the run began. If no rank did, it is from the first rank that has it.
        alike: Parts whose state is the same on all ranks; rank 0 writes it.
        of_rank: Parts whose state differs from rank to rank; each rank writes its own. The part `random` is restored
            only if the run resumes on the same number of ranks.
        carried_over: Returns the groups that later steps need (surplus, unfinished, generated ahead), by the names of
            their files.
        take_over: Restores these groups, after the states of `alike`; called by all ranks.
        start: Progress at the start: seed, data and config of the run, no step and no state.
        gather: Returns the JSON-able value of every rank, in order; a collective of all ranks.
    """

    strategy: TrainingStrategy
    roles: tuple[str, ...]
    module: RLModule
    changed: Mapping[str, StatefulPart]
    alike: Mapping[str, StatefulPart]
    of_rank: Mapping[str, StatefulPart]
    carried_over: Callable[[], dict[str, Groups]]
    take_over: Callable[[ReadGroups], None]
    start: Progress
    gather: Callable[[Any], list[Any]]
    # Digests of entries and of the module's tensors when the run began.
    _before: tuple[dict[str, str], dict[str, str]] = field(default=({}, {}), init=False)

    def begin(self) -> None:
        """Record the state before the run's first step, to tell later which entries this rank changed."""
        state, tensors = self._changed()
        self._before = _digests(self._entries(state), tensors)

    def take(self) -> Snapshot:
        """This rank's state as it is now, taken without communication."""
        changed, tensors = self._changed()
        state = changed | _states(self.alike)
        progress = replace(self.start, step=state["steps"]["step"], state=state)
        of_rank = {"ranks": self.strategy.world_size, **copy.deepcopy(_states(self.of_rank))}
        return Snapshot(progress, tensors, of_rank, self.carried_over())

    def agreed(self, here: Snapshot) -> Snapshot:
        """This rank's snapshot, completed by what other ranks changed; a collective of all ranks.

        Its progress is then the same on all ranks, and its tensors are those that this rank is to write.

        Raises:
            UserError: Two ranks changed a tensor of the module's state to different values.
        """
        entries, rank = self._entries(here.progress.state), self.strategy.global_rank
        digests = _digests(entries, here.tensors)
        of_ranks = self.gather([_marked(now, before) for now, before in zip(digests, self._before, strict=True)])
        writers = _changed_by([of_entries for of_entries, _ in of_ranks])
        every = self.gather({name: entries[name] for name, ranks in writers.items() if ranks[0] == rank})
        state = {**here.progress.state, "module": {}, **{part: {} for part in self.changed}}
        for name, value in (entry for of_rank in every for entry in of_rank.items()):
            part, _, of_part = name.partition("/")
            state[part][of_part] = value
        tensors = {}
        of_tensors = [of_rank for _, of_rank in of_ranks]
        for name, (first, *others) in _changed_by(of_tensors).items():
            for other in others:
                (digest_of_other, changed), (expected, _) = of_tensors[other][name], of_tensors[first][name]
                if changed and digest_of_other != expected:
                    raise UserError(
                        f"`{name}` of the module's state is one tensor on rank {first} and another on rank {other}, and"
                        " a checkpoint has one; compute it from what all ranks share, such as `all_rows` or `mean`"
                    )
            if first == rank:
                tensors[name] = here.tensors[name]
        return replace(here, progress=replace(here.progress, state=state), tensors=tensors)

    def restore(self, folder: Path, progress: Progress) -> list[str]:
        """Restore all parts from a checkpoint; called by all ranks after their roles were loaded.

        Args:
            folder: Folder of the checkpoint.
            progress: Contents of its `state.json`.

        Returns:
            A line for each callback that has lost its state, or begins without one.
        """
        device, lines = self.strategy.root_device, list[str]()
        restore(folder, self.strategy, self.roles)
        restore_module(self.module, folder, progress.state["module"])
        for name, part in {**self.changed, **self.alike}.items():
            lines += part.load_state_dict(progress.state[name]) or ()
        self.take_over(lambda name, like: read_groups(folder, name, like, device))
        for of_rank in read_of_rank(folder, self.strategy.global_rank, self.strategy.world_size):
            for name, part in self.of_rank.items():
                if name != "random" or of_rank["ranks"] == self.strategy.world_size:  # else no rank continues those
                    part.load_state_dict(of_rank[name])
        return lines

    def _changed(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The states of the module and of `changed` on this rank: copies of JSON-able values, and the tensors."""
        added: dict[str, Any] = {}
        self.module.on_save_checkpoint(added)
        state = self.module.state_dict() | {f"{ADDED}{name}": value for name, value in added.items()}
        module, tensors = without_tensors(state)
        copies = self.module.memories()  # their states are copies already, and may be long
        module = {name: x if name in copies else copy.deepcopy(x) for name, x in module.items()}
        return {"module": module, **_states(self.changed)}, tensors

    def _entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of the parts that some ranks change: `module/beta`, `updates/actor`."""
        parts = ("module", *self.changed)
        return {f"{part}/{name}": value for part in parts for name, value in state[part].items()}


def restore_module(module: RLModule, folder: Path, stored: Mapping[str, Any]) -> None:
    """Give a module the state that a checkpoint has of it.

    Args:
        module: The module.
        folder: Folder of the checkpoint, which has the tensors.
        stored: The rest of the state, from `state.json` there.
    """
    state = with_tensors(stored, read_module_tensors(folder))
    added = {name.removeprefix(ADDED): state.pop(name) for name in [*state] if name.startswith(ADDED)}
    module.load_state_dict(state)
    if added:
        module.on_load_checkpoint(added)


def _states(parts: Mapping[str, StatefulPart]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


Digest = tuple[str, bool]  # digest of an entry, and whether this rank changed the entry since the run began


def _marked(now: Mapping[str, str], before: Mapping[str, str]) -> dict[str, Digest]:
    return {name: (digest, digest != before.get(name)) for name, digest in now.items()}


def _changed_by(of_ranks: Sequence[Mapping[str, Digest]]) -> dict[str, list[int]]:
    """Ranks that changed each entry since the run began, by its name; if none did, the ranks that have it."""
    ranks = {}
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        having = [rank for rank, of_rank in enumerate(of_ranks) if name in of_rank]
        ranks[name] = [rank for rank in having if of_ranks[rank][name][1]] or having
    return ranks


def _digests(entries: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, str]]:
    of_entries = {}
    for name, value in entries.items():
        try:
            of_entries[name] = digest_of(value)
        except TypeError as error:
            raise UserError(
                f"`{name.partition('/')[2]}` cannot be saved in a checkpoint ({error}); give numbers, texts, lists,"
                " dicts of texts to them, or tensors"
            ) from error
    return of_entries, {name: digest(tensor) for name, tensor in tensors.items()}


class RandomStates:
    """The states of the random generators of Python, numpy and torch, JSON-able.

    Args:
        device: Device of the rank; if it is a GPU, the states include its generator's state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """The states of the generators now."""
        version, words, gauss = random.getstate()
        kind, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
        on_gpu = self._device.type == "cuda"
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, [int(key) for key in keys], place, has_gauss, cached],
            "torch": torch.get_rng_state().numpy().tobytes().hex(),
            "cuda": torch.cuda.get_rng_state(self._device).numpy().tobytes().hex() if on_gpu else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to the states that `state_dict` returned."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        if state["cuda"] is not None and self._device.type == "cuda":
            on_gpu = torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8)
            torch.cuda.set_rng_state(on_gpu, self._device)
