"""Rewards that run in a process of their own."""

import os
import time
from typing import Any


def length(response: str, row: dict[str, Any]) -> float:
    return len(response)


def parts(response: str, row: dict[str, Any]) -> dict[str, float]:
    return {"long": len(response), "right": float(response == row["answer"])}


def hangs_on_x(response: str, row: dict[str, Any]) -> float:
    while "x" in response:
        pass
    return len(response)


def leaves(response: str, row: dict[str, Any]) -> float:
    os._exit(0)


def waits(response: str, row: dict[str, Any]) -> float:
    time.sleep(0.3)
    return 1.0
