"""Environments that draw from the process-wide random numbers."""

from __future__ import annotations

import random

import numpy as np


class Drawing:
    """Says what it draws."""

    def reset(self) -> str:
        return f"{random.random()} {np.random.random()}"

    async def draw(self) -> str:
        """Draw a number."""
        return str(random.random())


random.random()  # as a module may where it is imported
