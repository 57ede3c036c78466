"""Errors of collectives that show a fault of another rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rlflow.databuffer.transport import of_a_collective
from rlflow.errors import UserError


def raised_from(cause: Exception) -> Exception:
    try:
        raise RuntimeError("the buffer could not be read") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (dist.DistNetworkError("connection reset by peer"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), True),
        (raised_from(dist.DistBackendError("NCCL error")), True),
        (raised_from(ValueError("no number")), False),
        (UserError("`lr` is 0"), False),
        (None, False),
    ],
)
def test_it_is_told_whether_another_rank_is_to_blame(error: Exception | None, is_one: bool) -> None:
    assert of_a_collective(error) is is_one
