"""What a role takes of a rank in each phase of a run: while it is loaded, trained, brought to an engine, and saved.

Bytes above what the rank holds without the role. Beside what `rlflow.memory` counts there are the copies that come and
go: of what is read, flattened, gathered and written.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from rlflow.memory.estimate import (
    activation_bytes,
    gathered_bytes,
    gradient_bytes,
    logit_bytes,
    optimizer_bytes,
    reduced_bytes,
    stepping_bytes,
    weight_bytes,
)
from rlflow.memory.workload import RoleTraining
from rlflow.models.sizes import ModelSize


@dataclass(frozen=True)
class Phases:
    """The most bytes of a rank in each phase.

    Attributes:
        loading: From the first byte that is read to the first step.
        step: Forward and backward passes and the update.
        sync: Weights on their way to the engine.
        saving: A checkpoint and the model.
        resuming: A checkpoint read again.
    """

    loading: float
    step: float
    sync: float
    saving: float
    resuming: float

    def by_name(self) -> dict[str, float]:
        """Of each phase."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def phases(size: ModelSize, how: RoleTraining, longest: float, buffer: float) -> Phases:
    """Of a role.

    Args:
        size: Of its model.
        how: It lies and is updated.
        longest: Tokens of the longest row.
        buffer: Bytes of weights gathered at once on their way to an engine or into a file.
    """
    piece = float(size.largest_layer * how.width)
    rests = resting_bytes(size, how)
    gathered = min(max(buffer, piece), size.parameters * how.width)
    lies = _gradients_at_rest(how)
    gradients = gradient_bytes(how) - lies if how.trained else 0.0
    passes = activation_bytes(size, how, longest) + logit_bytes(size, how, longest)
    moved = gathered_bytes(size, how) + reduced_bytes(size, how) - _buffer_at_rest(how)
    updated = rests + gradients + max(moved, stepping_bytes(how)) if how.trained else 0.0  # by which states are made
    return Phases(
        loading=loading_bytes(size, how),
        step=rests + gradients + max(passes + moved, stepping_bytes(how)),
        sync=rests + gathered,
        saving=rests + gathered,
        resuming=max(loading_bytes(size, how), rests + piece, updated),
    )


def loading_bytes(size: ModelSize, how: RoleTraining) -> float:
    """The most while a role is loaded: whole, or from the first byte its own part and one piece."""
    weights, piece = weight_bytes(size, how), float(size.largest_layer * how.width)
    has_copy = how.moments % 2  # in float32, beside two moments or none
    copied = has_copy * how.trained * how.summed_width / how.states_over
    if how.stage == 3:
        return weights + copied + _gradients_at_rest(how) + piece
    if how.stage and how.trained:  # flattened; then the part that this rank steps is cut out, and copied
        return max(2 * weights, weights + 2 * copied)
    return weights + copied


def resting_bytes(size: ModelSize, how: RoleTraining) -> float:
    """Between steps, after the first: weights and states, and what DeepSpeed keeps at ZeRO-3."""
    states = 0.0 if how.offloaded else optimizer_bytes(how)
    weights = 0.0 if how.weights_offloaded else weight_bytes(size, how)
    return weights + states + _gradients_at_rest(how) + _buffer_at_rest(how)


def _gradients_at_rest(how: RoleTraining) -> float:
    return gradient_bytes(how) if how.trained and not how.masters and how.stage == 3 else 0.0


def _buffer_at_rest(how: RoleTraining) -> float:
    return float(how.bucket * how.summed_width) if how.stage == 3 else 0.0
