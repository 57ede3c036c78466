"""A picture of a run: its reward and validation curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.loggers.jsonl import read_metrics

CURVES_FILE = "curves.png"
PANELS = {
    "reward in training": ("reward/mean",),
    "validation accuracy": ("val/accuracy", "val_greedy/accuracy"),
    "validation margin": ("val/margin",),
}


def draw_curves(folder: Path, panels: Mapping[str, Sequence[str]] = PANELS) -> Path:
    """Draw metrics of a run folder's `metrics.jsonl` over its steps into its `curves.png`.

    Args:
        folder: The run's.
        panels: Titles, and the metrics drawn under each. A panel whose metrics the run did not log is left out.
    """
    # The object form with its own canvas: no window system, and no state shared with a user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    curves = {title: {name: _curve(lines, name) for name in names} for title, names in panels.items()}
    drawn = {title: {name: curve for name, curve in of.items() if curve[0]} for title, of in curves.items()}
    drawn = {title: of for title, of in drawn.items() if of}

    figure = Figure(figsize=(6.0, 3.2 * max(len(drawn), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (title, of) in enumerate(drawn.items()):
        axes = figure.add_subplot(len(drawn), 1, row + 1)
        for name, (steps, values) in of.items():
            axes.plot(steps, values, marker="o" if len(steps) < 30 else None, markersize=3, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    picture = folder / CURVES_FILE
    figure.savefig(picture, dpi=150)
    return picture


def _curve(lines: Sequence[Mapping[str, float | None]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one metric, where it was logged as a number."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [float(step) for step, _ in points if step is not None], [
        float(value) for _, value in points if value is not None
    ]
