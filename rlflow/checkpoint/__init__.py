"""Checkpoints that a run continues from to the bit: safetensors by parameter name, and JSON. No pickle.

    checkpoint/step-00000020/
      state.json                      step, policy version, what the run was started with, callbacks, module, norms
                                      and gaps that later steps are compared with; the format's number; size, SHA-256
                                      and rank of every file; its own digest
      actor.json                      updates done, what the role's state belongs to, each parameter's shape and ranges
      actor-00000-of-00002.safetensors    rank 0's ranges of `<Hugging Face name>/weight`, `.../exp_avg`, ...
      actor-00001-of-00002.safetensors
      module-state-00000-of-00002.safetensors   tensors of the module's state that rank 0 writes, by name
      surplus*, unfinished*, step-*   groups beyond a step's, unfinished, and generated ahead, see `.stored_groups`

Every rank of a role writes the ranges of flattened tensors that it holds, and any ranks at any ZeRO stage read theirs.
What rlflow draws (rows, mini-batches, samples) is a function of (seed, step, draw). The process-wide generators, which
a user's code may draw from, are kept by rank in `logged-*`, beside what a rank logged of steps in progress.
"""

from rlflow.checkpoint.manifest import (
    AUTO,
    FORMAT,
    LAST,
    STATE,
    Progress,
    changed_files,
    damage,
    digest_of,
    find,
    lacks,
    newest_first,
    read_progress,
)
from rlflow.checkpoint.reading import restore
from rlflow.checkpoint.retention import Retention
from rlflow.checkpoint.writing import (
    complete,
    draft_of,
    leave,
    read_module_tensors,
    read_of_rank,
    write_share,
    written_state,
)

__all__ = [
    "AUTO",
    "FORMAT",
    "LAST",
    "STATE",
    "Progress",
    "Retention",
    "changed_files",
    "complete",
    "damage",
    "digest_of",
    "draft_of",
    "find",
    "lacks",
    "leave",
    "newest_first",
    "read_module_tensors",
    "read_of_rank",
    "read_progress",
    "restore",
    "write_share",
    "written_state",
]
