"""What answers a policy: environments, tools, and how turns become tokens."""

from rlflow.environments.gyms import SkyRLGym, TextGym
from rlflow.environments.python_tool import PythonTool, python
from rlflow.environments.text_arena import TextArena

__all__ = ["PythonTool", "SkyRLGym", "TextArena", "TextGym", "python"]
