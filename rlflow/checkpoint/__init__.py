"""Checkpoints that a run continues from to the bit: safetensors by parameter name, and JSON. No pickle.

    checkpoint/step-00000020/
      state.json                      step, what the run was started with, the state of its parts by name; the format's
                                      number; size, SHA-256 and rank of every file; its own digest
      actor.json                      updates done, what the role's state belongs to, each parameter's shape and ranges
      actor-00000-of-00002.safetensors    rank 0's ranges of `<Hugging Face name>/weight`, `.../exp_avg`, ...
      actor-00001-of-00002.safetensors
      module-state-00000-of-00002.safetensors   tensors of the module's state that rank 0 writes, by name
      logged-00000-of-00002.json      what rank 0 alone has: what it logged of steps in progress, its random generators
      surplus*, unfinished*, step-*   groups beyond a step's, unfinished, and generated ahead, see `.stored_groups`

`rlflow.run.saving.checkpoint_of` lists the parts of a run that have a state. Every rank of a role writes the ranges of
flattened tensors that it holds, and any ranks at any ZeRO stage read theirs.
"""

from rlflow.checkpoint.contents import Checkpoint as Checkpoint
from rlflow.checkpoint.contents import RandomStates as RandomStates
from rlflow.checkpoint.contents import Snapshot as Snapshot
from rlflow.checkpoint.manifest import AUTO as AUTO
from rlflow.checkpoint.manifest import FORMAT as FORMAT
from rlflow.checkpoint.manifest import LAST as LAST
from rlflow.checkpoint.manifest import STATE as STATE
from rlflow.checkpoint.manifest import Progress as Progress
from rlflow.checkpoint.manifest import changed_files as changed_files
from rlflow.checkpoint.manifest import damage as damage
from rlflow.checkpoint.manifest import digest_of as digest_of
from rlflow.checkpoint.manifest import find as find
from rlflow.checkpoint.manifest import folder_of as folder_of
from rlflow.checkpoint.manifest import lacks as lacks
from rlflow.checkpoint.manifest import newest_first as newest_first
from rlflow.checkpoint.manifest import read_progress as read_progress
from rlflow.checkpoint.reading import restore as restore
from rlflow.checkpoint.retention import Retention as Retention
from rlflow.checkpoint.writing import complete as complete
from rlflow.checkpoint.writing import leave as leave
from rlflow.checkpoint.writing import write_share as write_share
from rlflow.checkpoint.writing import written_state as written_state
