"""The next batch is read while this one is worked on: the loader's half of double buffering."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from torch import Tensor

from rlflow.data.chosen_rows import Epoch
from rlflow.data.loader import Loader
from rlflow.values.batch import Batch, Pairs

_Draw = tuple[int, int, int]  # draw, shard, shards


class Prefetch:
    """A loader, one draw ahead of its reader. What it gives is the loader's own, whatever the timing.

    One thread reads, and all that is read is read by it, so a source is never asked for two rows at once. It starts at
    the first draw: a rank that loads nothing has none.

        with Prefetch(loader, draws=100) as prompts:
            batch, ids = prompts.batch(0, shard=0, shards=2)

    Args:
        loader: What is read.
        draws: The run's draws, past which nothing is read; None where nobody knows, and at most one is read in vain.
    """

    def __init__(self, loader: Loader, draws: int | None) -> None:
        self._loader = loader
        self._draws = draws
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlflow-prefetch")
        self._next: tuple[_Draw, Future[tuple[Batch | Pairs, Tensor]]] | None = None

    @property
    def prompts_per_step(self) -> int:
        """Rows of one draw."""
        return self._loader.prompts_per_step

    def begin(self, draw: int) -> Epoch | None:
        """As `Loader.begin`, which waits for what a module learns: so no draw of a later epoch is read ahead of it."""
        return self._loader.begin(draw)

    def batch(self, draw: int, shard: int, shards: int) -> tuple[Batch | Pairs, Tensor]:
        """What `Loader.batch` gives; then the next draw is begun.

        Raises:
            UserError: As `Loader.batch`, of this draw: faults of the next one are reported when it is asked for.
        """
        expected, coming = self._next or (None, None)
        self._next = None
        if coming is None or expected != (draw, shard, shards):
            coming = self._reader.submit(self._loader.batch, draw, shard, shards)
        read = coming.result()
        if (self._draws is None or draw + 1 < self._draws) and self._loader.knows(draw + 1):
            following = (draw + 1, shard, shards)
            self._next = following, self._reader.submit(self._loader.batch, *following)
        return read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._reader.shutdown(cancel_futures=True)
