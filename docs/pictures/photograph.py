"""Photograph the quickstart's page anew, wide and narrow, light and dark: python docs/pictures/photograph.py

It needs Chromium. The page is made after `make quickstart`:

    rlflow report runs/quickstart/grpo --html --to docs/quickstart_report.html
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

PICTURES = Path(__file__).parent
WIDE, NARROW = 1200, 390  # pixels: a window, and a telephone
LEAST = 500  # pixels, of Chromium's windows: a narrower page is shown in a frame
GAP = 24  # pixels between pictures


def browser() -> str | None:
    """Chromium's program, if there is one."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def photograph(page: str, width: int, height: int, dark: bool) -> tuple[Image.Image, int]:
    """The beginning of a page, and the width in pixels that its content takes: more than `width` if it is cut off.

    Args:
        page: HTML of the page.
        width: Width of the page in pixels.
        height: Height of the picture in pixels.
        dark: Whether the browser asks for dark pages.
    """
    name = browser()
    assert name is not None, "there is no Chromium: install Debian's package `chromium`"
    measure = "document.title = frames[0].document.documentElement.scrollWidth"
    frame = (
        f'<html style="color-scheme: light dark"><title></title><body style="margin: 0" onload="{measure}">'
        f'<iframe style="border: 0" width="{width}" height="{height}" srcdoc="{escape(page)}"></iframe>'
    )
    with tempfile.TemporaryDirectory() as scratch:
        file, picture = Path(scratch, "frame.html"), Path(scratch, "picture.png")
        file.write_text(f"<!DOCTYPE html>{frame}", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={scratch}/of"]
        options += [f"--window-size={max(LEAST, width)},{height}", *["--force-dark-mode"] * dark]
        command = [name, *options, "--dump-dom", f"--screenshot={picture}", file.as_uri()]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        taken = int(shown.partition("<title>")[2].partition("</title>")[0])
        return Image.open(picture).convert("RGB").crop((0, 0, width, height)), taken


def beside(*images: Image.Image) -> Image.Image:
    """Images side by side on a grey ground."""
    across = sum(image.width for image in images) + GAP * (len(images) + 1)
    whole = Image.new("RGB", (across, max(image.height for image in images) + 2 * GAP), "#868e96")
    left = GAP
    for image in images:
        whole.paste(image, (left, GAP))
        left += image.width + GAP
    return whole


def save(image: Image.Image, name: str) -> None:
    """Write a picture of few colors, which is a third of the size."""
    image.quantize(255, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)


if __name__ == "__main__":
    page = (PICTURES.parent / "quickstart_report.html").read_text(encoding="utf-8")
    save(photograph(page, WIDE, 3100, dark=False)[0], "report.png")
    save(photograph(page, WIDE, 1800, dark=True)[0], "report_dark.png")
    save(beside(*(photograph(page, NARROW, 1400, dark)[0] for dark in (False, True))), "report_narrow.png")
