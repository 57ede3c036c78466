"""Access to the Hugging Face hub, and runs without it."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from functools import cache
from threading import Thread

WAIT_S = 4.0


@cache
def offline_unless_reached() -> bool:
    """From now on, use the machine's cache of the hub if the hub does not answer within `WAIT_S` seconds.

    Its own libraries try for a minute before they say so. Processes that this one starts do as it does.

    Returns:
        Whether it is asked for nothing more.
    """
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:  # else it will read this when it is imported
            datasets.config.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
    return bool(constants.HF_HUB_OFFLINE)


def _answers(url: str) -> bool:
    answers: list[bool] = []

    def ask() -> None:
        with suppress(OSError, ValueError):
            with suppress(urllib.error.HTTPError):  # an answer too
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=WAIT_S)
            answers.append(True)

    thread = Thread(target=ask, daemon=True)  # looking up a name has no timeout of its own
    thread.start()
    thread.join(WAIT_S)
    return bool(answers)
