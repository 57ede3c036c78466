"""Draw the graphs that the documentation shows, from the configs: python docs/pictures/draw.py"""

from __future__ import annotations

import re
from pathlib import Path

from rlflow.commands.graph import ConfiguredGraph, read_graph

PICTURES = Path(__file__).parent
ROOT = PICTURES.parent.parent


def pictures() -> dict[str, Path]:
    """Each picture, relative to this folder and without its suffix, and the config that it is drawn from."""
    configs = ROOT / "configs"
    page = (PICTURES.parent / "algorithms.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(pictures/(algorithms/(\w+))\.svg\)", page)
    others = {"grpo": "quickstart_grpo", "grpo_8_gpus": "grpo_math_8gpu"}
    return {picture: configs / f"{config}.yaml" for picture, config in [*shown, *others.items()]}


def draw(config: Path, to: Path) -> None:
    """Write `to`.svg and `to`.mmd."""
    configured = read_graph(["--config", str(config), "--draw", str(to)])
    assert isinstance(configured, ConfiguredGraph)
    configured.show()


if __name__ == "__main__":
    for picture, config in pictures().items():
        draw(config, PICTURES / picture)
        (PICTURES / picture).with_suffix(".mmd").unlink()
