"""For tests of algorithms: `check` says what changes an algorithm's gradient and should not."""

from rlflow.testing.check import Report, check

__all__ = ["Report", "check"]
