"""Rewards that run in a process of their own."""

import os
import time
from typing import Any


def length(text: str, row: dict[str, Any]) -> float:
    return len(text)


def parts(text: str, row: dict[str, Any]) -> dict[str, float]:
    return {"long": len(text), "right": float(text == row["answer"])}


def hangs_on_x(text: str, row: dict[str, Any]) -> float:
    while "x" in text:
        pass
    return len(text)


def leaves(text: str, row: dict[str, Any]) -> float:
    os._exit(0)


def waits(text: str, row: dict[str, Any]) -> float:
    time.sleep(0.3)
    return 1.0
