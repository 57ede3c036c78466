"""Runs an agent that is a program, in a worker; it imports only the standard library."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any


def run(command: list[str], row: dict[str, Any], base_url: str, key: str, model: str) -> Any:
    """The JSON value in the last line that a program prints.

    The program gets the row as JSON on its standard input, and the variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and `RLFLOW_MODEL`, the name by which it calls the policy.

    Raises:
        RuntimeError: It failed, or its last line is no JSON.
    """
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "RLFLOW_MODEL": model,
    }
    ran = subprocess.run(
        command,
        input=json.dumps(row),
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **variables},
        check=False,
    )
    if ran.returncode:
        last = ran.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"the program ended with code {ran.returncode}" + (f": {last}" if last else ""))
    last = ran.stdout.strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        raise RuntimeError(f"the program's last line is {last!r:.100}, and no JSON") from None
