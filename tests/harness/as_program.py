"""Runs a `solve` as a program, in an environment without rlflow: `python -P as_program.py FILE`."""

import asyncio
import importlib.util
import inspect
import json
import os
import sys

spec = importlib.util.spec_from_file_location("agent", sys.argv[1])
assert spec is not None
assert spec.loader is not None
agent = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent)
reward = agent.solve(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
print(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)
