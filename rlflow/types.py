"""Types of parts of a value, and of values at other levels: a node is sent what the type of its parameter names.

`Rollout` and `RolloutWithTexts` of `rlflow` have all fields; a node that needs less takes one of these.
"""

from rlflow.values.cuts import Scalar as Scalar
from rlflow.values.each import Each as Each
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
