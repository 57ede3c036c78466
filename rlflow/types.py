"""Types of parts of a value: a node whose parameter has one of them is sent these fields alone.

`Rollout` and `RolloutWithTexts` of `rlflow` have all fields; these are for what a node needs no more of.
"""

from rlflow.values.cuts import Scalar
from rlflow.values.each import Grown, Trained
from rlflow.values.path import RowPath
from rlflow.values.protocols import Grouped, Masked, MaskedTokens, Sampled, Sourced, Tokens, Written
from rlflow.values.ragged import Ragged

__all__ = [
    "Grouped",
    "Grown",
    "Masked",
    "MaskedTokens",
    "Ragged",
    "RowPath",
    "Sampled",
    "Scalar",
    "Sourced",
    "Tokens",
    "Trained",
    "Written",
]
