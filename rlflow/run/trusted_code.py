"""Whose models' own code a run runs, said in its first lines."""

from __future__ import annotations

from rlflow.module import handles
from rlflow.run.prepared_run import Prepared


def trusted_code(prepared: Prepared) -> list[str]:
    """A line for each model for which `trust_remote_code` is on, and the roles that are of it."""
    found, roles = handles(prepared.module), prepared.policies | prepared.paths
    trusted: dict[str, list[str]] = {}
    for role in roles:
        if found[role].trust_remote_code:
            trusted.setdefault(found[role].model, []).append(f"`{role}`")
    return [
        f"`trust_remote_code` is on for {', '.join(names)}: the code that lies beside {model!r} is run"
        for model, names in trusted.items()
    ]
