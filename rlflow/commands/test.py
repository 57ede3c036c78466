"""`rlflow test`: avg@k and pass@k of a config's model on held-out prompts, with intervals."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.commands.configuration import Configured, call_configured
from rlflow.process.status import refusing_exits


def test(configured: Configured, /) -> None:
    """Score a config's model on held-out prompts: avg@k, pass@k, with intervals.

    Args:
        configured: The model, and the prompts.
    """
    configured.trainer.test(configured.module, configured.data)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow test`."""
    with refusing_exits():
        call_configured(test, arguments)
