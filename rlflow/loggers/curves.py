"""Chart of a run: its reward and validation curves."""

from __future__ import annotations

from pathlib import Path

from rlflow.loggers.jsonl import read_metrics

CURVES_FILE = "curves.png"
PANELS = {
    "reward in training": ("reward/mean",),
    "validation accuracy": ("val/accuracy", "val_greedy/accuracy"),
    "validation margin": ("val/margin",),
}


def draw_curves(folder: Path) -> Path:
    """Draw metrics of a run folder's `metrics.jsonl` over its steps into its `curves.png`.

    A panel whose metrics the run did not log is left out.
    """
    # The object form with its own canvas: no window system, and no state shared with a user's own figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    logged = {name for line in lines for name, value in line.items() if value is not None}
    drawn = {title: found for title, names in PANELS.items() if (found := [name for name in names if name in logged])}
    figure = Figure(figsize=(6.0, 3.2 * max(len(drawn), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (title, names) in enumerate(drawn.items(), start=1):
        axes = figure.add_subplot(len(drawn), 1, row)
        for name in names:
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            marker = "o" if len(points) < 30 else None
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=name)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    picture = folder / CURVES_FILE
    figure.savefig(picture, dpi=150)
    return picture
