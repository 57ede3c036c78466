"""One controller per rank."""

from rlflow.controller.controller import Controller

__all__ = ["Controller"]
