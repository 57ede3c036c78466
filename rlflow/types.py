"""Types of parts of a value, and of values at other levels: a node is sent what the type of its parameter names.

`Rollout` and `RolloutWithTexts` of `rlflow` have all fields; a node that needs less takes one of these.
"""

from rlflow.values.column_kinds import Scalar as Scalar
from rlflow.values.each import After as After
from rlflow.values.each import Each as Each
from rlflow.values.each import NewRows as NewRows
from rlflow.values.path import RowPath as RowPath
from rlflow.values.protocols import Grouped as Grouped
from rlflow.values.protocols import Sampled as Sampled
from rlflow.values.protocols import Tokens as Tokens
from rlflow.values.protocols import TokensWithLossMask as TokensWithLossMask
from rlflow.values.protocols import WithDatasetRows as WithDatasetRows
from rlflow.values.protocols import WithLossMask as WithLossMask
from rlflow.values.protocols import WithTexts as WithTexts
from rlflow.values.ragged import Ragged as Ragged
