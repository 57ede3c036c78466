"""Numbers of each sample by name."""

from __future__ import annotations

from torch import Tensor

from rlflow.errors import UserError, did_you_mean


class Parts(dict[str, Tensor]):
    """Numbers of each sample by name, `[B]` each, such as what a reward is made of; `dict[str, PerSample]` to nodes."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"a node reads part `{name}`, which the reward lacks; its parts are [{', '.join(self)}]."
            f"{did_you_mean(name, self)} Give the reward that part, or read another"
        )
