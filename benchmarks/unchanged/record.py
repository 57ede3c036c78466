"""All numbers that a run left: its metrics and samples by step, and a digest of each tensor of each trained model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, uint8

Value = float | str | None
Values = dict[str, dict[str, Value]]  # by place, such as `step 2`, and name


def values_of(run: Path) -> Values:
    """The values of a run's folder that are compared, in the order in which they were written."""
    found: Values = {}
    for line in _lines(run / "metrics.jsonl"):
        step = found.setdefault(f"step {line.pop('step')}", {})
        assert not step.keys() & line.keys(), "a metric was logged twice in a step"
        step.update(line)
    for line in _lines(run / "samples.jsonl"):
        step = found.setdefault(f"samples of step {line.pop('step')}", {})
        row = len({name.split(".")[0] for name in step})
        step.update({f"{row}.{name}": value for name, value in _flat(line)})
    for file in sorted(run.glob("model*/*.safetensors")):
        found.setdefault(f"weights of {file.parent.name}", {}).update(_digests(file))
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _flat(tree: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", leaf) for inner, leaf in _flat(value))
        else:
            yield name, value


def _digests(file: Path) -> dict[str, Value]:
    with safe_open(file, "pt") as tensors:
        return {name: _digest(tensors.get_tensor(name)) for name in sorted(tensors.keys())}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()
