"""Draws the curves of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.gates import Run
from benchmarks.learning.runs import curve


def draw_panels(
    path: Path, panels: Mapping[str, tuple[str, Sequence[Run]]], columns: int = 4, beside: Sequence[Run] = ()
) -> None:
    """A panel for each name: a metric of each of its runs by step, and that of the runs `beside` in grey."""
    pyplot = _pyplot()
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 2.2 * rows), layout="constrained", squeeze=False
    )
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    for (name, (metric, runs)), panel in zip(panels.items(), axes.flat, strict=False):
        for run in beside:
            panel.plot(*zip(*curve(run, metric), strict=True), linewidth=1, color="grey", alpha=0.6)
        for run in runs:
            panel.plot(*zip(*curve(run, metric), strict=True), linewidth=1.2)
        panel.set_title(name, fontsize=9)
        panel.set_ylabel(metric, fontsize=7)
        panel.tick_params(labelsize=7)
    figure.savefig(path, metadata={"Date": None})


def draw_beside(path: Path, sides: Mapping[str, Sequence[Run]], metrics: Sequence[str]) -> None:
    """A panel for each metric, with the runs of each side in one colour."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(metrics), figsize=(4 * len(metrics), 3), layout="constrained")
    for metric, panel in zip(metrics, axes, strict=True):
        for number, (side, runs) in enumerate(sides.items()):
            for seed, run in enumerate(runs):
                label = side if seed == 0 else None
                panel.plot(*zip(*curve(run, metric), strict=True), color=f"C{number}", linewidth=1, label=label)
        panel.set_title(metric, fontsize=9)
        panel.set_xlabel("step", fontsize=7)
        panel.tick_params(labelsize=7)
    axes[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "learning"  # ids that are the same each time
    from matplotlib import pyplot

    return pyplot
