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
def test_errors_of_collectives_are_distinguished_from_a_rank_s_own(error: Exception | None, is_one: bool) -> None:
    assert of_a_collective(error) is is_one
