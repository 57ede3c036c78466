"""Checkpoints from which a run resumes to the bit: safetensors by parameter name, and JSON. No pickle.

    checkpoint/step-00000020/
      state.json                      step, seed, data and config of the run; state of its parts by name; number of the
                                      format; size, SHA-256 and rank of every file; digest of all this
      actor.json                      number of updates, a description of the model under adapters, shape and ranges of
                                      each parameter
      actor-00000-of-00002.safetensors    rank 0's ranges of `<Hugging Face name>/weight`, `.../exp_avg`, ...
      actor-00001-of-00002.safetensors
      module-state-00000-of-00002.safetensors   tensors of the module's state that rank 0 writes, by name
      logged-00000-of-00002.json      state of rank 0 alone: metrics of steps in progress, its random generators
      surplus*, unfinished*, step-*   groups for later steps: surplus, unfinished, generated ahead; see `.stored_groups`

`rlflow.run.saving.checkpoint_of` lists the parts of a run that have a state. Every rank of a role writes the ranges of
flattened tensors that it holds. Any number of ranks, at any ZeRO stage, can read the ranges that they need.
"""

from rlflow.checkpoint.contents import Checkpoint as Checkpoint
from rlflow.checkpoint.contents import RandomStates as RandomStates
from rlflow.checkpoint.contents import Snapshot as Snapshot
from rlflow.checkpoint.contents import restore_module as restore_module
from rlflow.checkpoint.manifest import AUTO as AUTO
from rlflow.checkpoint.manifest import BEST as BEST
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
from rlflow.checkpoint.manifest import monitored_values as monitored_values
from rlflow.checkpoint.manifest import newest_first as newest_first
from rlflow.checkpoint.manifest import read_progress as read_progress
from rlflow.checkpoint.reading import restore as restore
from rlflow.checkpoint.retention import Retention as Retention
from rlflow.checkpoint.writing import complete as complete
from rlflow.checkpoint.writing import leave as leave
from rlflow.checkpoint.writing import remove_later as remove_later
from rlflow.checkpoint.writing import write_share as write_share
from rlflow.checkpoint.writing import written_state as written_state
