"""Workflows written in a config: the module that has no node of its own, and losses that a config can name."""

from rlflow.workflow.losses import policy_loss
from rlflow.workflow.module import Workflow

__all__ = ["Workflow", "policy_loss"]
