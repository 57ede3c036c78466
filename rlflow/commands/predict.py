"""`rlflow predict`: responses of a config's model to prompts."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.commands.configuration import Configured, call_configured
from rlflow.process.status import refusing_exits


def predict(configured: Configured, /) -> None:
    """Write a config's model's responses to prompts as JSON Lines.

    Args:
        configured: The model, and the prompts: `data.train`.
    """
    configured.trainer.predict(configured.module, configured.data)


def main(arguments: Sequence[str]) -> None:
    """Run `rlflow predict`."""
    with refusing_exits():
        call_configured(predict, arguments)
