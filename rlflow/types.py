"""Types of parts of a value: a node with a parameter of such a type is sent these fields alone.

`Rollout` and `RolloutWithTexts` of `rlflow` have all fields; these are for what a node needs no more of.
"""

from rlflow.values.cuts import Scalar as Scalar
from rlflow.values.each import Grown as Grown
from rlflow.values.each import Trained as Trained
from rlflow.values.path import RowPath as RowPath
from rlflow.values.protocols import Grouped as Grouped
from rlflow.values.protocols import Masked as Masked
from rlflow.values.protocols import MaskedTokens as MaskedTokens
from rlflow.values.protocols import Sampled as Sampled
from rlflow.values.protocols import Sourced as Sourced
from rlflow.values.protocols import Tokens as Tokens
from rlflow.values.protocols import Written as Written
from rlflow.values.ragged import Ragged as Ragged
