"""Environments that answer a policy, their tools, and how turns become tokens."""

from rlflow.environments.gyms import SkyRLGym, TextArena, TextGym
from rlflow.environments.python_tool import PythonTool, python

__all__ = ["PythonTool", "SkyRLGym", "TextArena", "TextGym", "python"]
