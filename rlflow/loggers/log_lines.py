"""Warnings that quote what a model, a dataset or a reward wrote."""

from __future__ import annotations

import logging

from rlflow.errors import readable, shown


class _OneReadableLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = readable(shown(record.getMessage())).replace("\n", "\\n")
        record.args = None
        return True


def line_log(name: str) -> logging.Logger:
    """A module's log. Each message is one line in which control characters are escaped."""
    log = logging.getLogger(name)
    if not any(isinstance(each, _OneReadableLine) for each in log.filters):
        log.addFilter(_OneReadableLine())
    return log
