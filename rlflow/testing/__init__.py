"""Tests of algorithms: `check` reports what changes an algorithm's gradient though it should not."""

from rlflow.testing.check import Report, check

__all__ = ["Report", "check"]
