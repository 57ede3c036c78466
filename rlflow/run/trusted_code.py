"""Whose models' own code a run runs, said in its first lines."""

from __future__ import annotations

from rlflow.controller.run import Run
from rlflow.module import handles


def trusted_code(run: Run) -> list[str]:
    """A line for each model for which `trust_remote_code` is on, and the roles that are of it."""
    found, roles = handles(run.module), run.policies | run.paths
    trusted: dict[str, list[str]] = {}
    for role in roles:
        if found[role].trust_remote_code:
            trusted.setdefault(found[role].model, []).append(f"`{role}`")
    return [
        f"`trust_remote_code` is on for {', '.join(names)}: the code that lies beside {model!r} is run"
        for model, names in trusted.items()
    ]
