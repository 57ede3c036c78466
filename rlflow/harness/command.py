"""Runs an agent that is a program, in a worker; it imports only the standard library."""

from __future__ import annotations

import json
import os
import subprocess
from tempfile import TemporaryFile
from typing import IO, Any


def run(command: list[str], row: dict[str, Any], base_url: str, key: str, model: str) -> Any:
    """The JSON value in the last line that a program prints.

    The program gets the row as JSON on its standard input, and the variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY` and `RLFLOW_MODEL`, the name by which it calls the policy.

    Raises:
        RuntimeError: It failed, or its last line is not JSON.
    """
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "RLFLOW_MODEL": model,
    }
    # Files, not pipes: what the program leaves running may hold these open for long after it has ended.
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as errors:
        given.write(json.dumps(row).encode())
        given.seek(0)
        environment = {**os.environ, **variables}
        code = subprocess.run(command, stdin=given, stdout=out, stderr=errors, env=environment, check=False).returncode
        printed, said = _last_line(out), _last_line(errors)
    if code:
        raise RuntimeError(f"the program ended with code {code}" + (f": {said}" if said else ""))
    try:
        return json.loads(printed)
    except ValueError:
        raise RuntimeError(f"the program's last line is {printed!r:.100}, and no JSON") from None


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip().rpartition("\n")[2]
