"""`watched`, which warns of a call that does not return, where nothing can end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlflow.loggers.log_lines import line_log

WARN_AFTER = 60.0  # seconds

log = line_log(__name__)


class CallWatch:
    """Looks after calls, in a thread of its own that starts with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, tuple[float, Callable[[], str]]] = {}  # since when, and where
        self._made = 0

    @contextmanager
    def watched(self, where: Callable[[], str]) -> Iterator[None]:
        """Warn, once, where what is within takes longer than `WARN_AFTER`.

        Args:
            where: The environment and its row, in words.
        """
        with self._lock:
            number = self._made = self._made + 1
            self._calls[number] = time.monotonic(), where
        if number == 1:
            threading.Thread(target=self._look, name="environments", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(number, None)

    def _look(self) -> None:
        while True:
            time.sleep(WARN_AFTER / 4)
            with self._lock:
                now = time.monotonic()
                late = {number: where for number, (since, where) in self._calls.items() if now - since > WARN_AFTER}
                for number in late:
                    del self._calls[number]
            for where in late.values():
                log.warning(
                    "an environment has not answered for %g s (%s), and code in the rank's own process cannot be ended;"
                    " set `environment.seconds`, so that it is",
                    WARN_AFTER,
                    where(),
                )


watch = CallWatch()
