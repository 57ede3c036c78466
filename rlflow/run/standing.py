"""Where a run stands between two steps, apart from weights and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlflow.callbacks.hooks import Callbacks
from rlflow.controller import Controller
from rlflow.controller.run import Run
from rlflow.databuffer.kept import Kept
from rlflow.metrics import Metrics
from rlflow.run import random_states
from rlflow.run.module_state import ModuleState


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
        of, states = run.transport, random_states.taken(run.strategy.root_device)
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
