"""The picture of a run's curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from rlflow.loggers import JSONLLogger
from rlflow.loggers.curves import draw_curves
from tests import no_curves


@pytest.fixture(autouse=True)
def _curves_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", no_curves.drawn)


def picture(folder: Path, lines: list[dict[str, float]]) -> np.ndarray:
    """The picture of these metrics at steps 1, 2, ..., `[height, width, 3]`."""
    folder.mkdir()
    logger = JSONLLogger()
    logger.start(folder)
    for step, metrics in enumerate(lines, start=1):
        logger.log_metrics(metrics, step)
    logger.finalize("success")
    return np.asarray(Image.open(draw_curves(folder)).convert("RGB"))


def test_each_kind_of_curve_has_a_panel_and_one_without_values_has_none(tmp_path: Path) -> None:
    both = picture(tmp_path / "both", [{"reward/mean": 0.1, "val/accuracy": 0.2}, {"reward/mean": 0.3}])
    one = picture(tmp_path / "one", [{"val/accuracy": 0.2, "time/step": 1.0}])
    assert both.shape[0] == 2 * one.shape[0]
    assert both.shape[1] == one.shape[1]


def test_the_curve_follows_the_values(tmp_path: Path) -> None:
    rising = picture(tmp_path / "rising", [{"reward/mean": 0.0}, {"reward/mean": 1.0}])
    falling = picture(tmp_path / "falling", [{"reward/mean": 1.0}, {"reward/mean": 0.0}])
    assert slope(rising) > 0 > slope(falling)


def test_a_run_without_rewards_and_accuracy_still_gets_a_picture(tmp_path: Path) -> None:
    assert picture(tmp_path / "none", [{"time/step": 1.0}]).size > 0


def slope(image: np.ndarray) -> float:
    """By how many pixels the blue line rises from the left third of the picture to the right one."""
    blue = (image[..., 2] > 150) & (image[..., 0] < 80)
    rows, columns = np.nonzero(blue)
    width = image.shape[1]
    return float(rows[columns < width / 3].mean() - rows[columns > width * 2 / 3].mean())
