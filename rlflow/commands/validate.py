"""`rlflow validate`: measure a config's model on its held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.commands.configuration import Configured, call_configured
from rlflow.process.status import refusing_exits


def validate(configured: Configured, /) -> None:
    """Measure a config's model on its held-out prompts.

    Args:
        configured: The model, and the prompts.
    """
    configured.trainer.validate(configured.module, configured.data)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow validate`."""
    with refusing_exits():
        call_configured(validate, arguments)
