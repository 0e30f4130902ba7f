"""Progress of work on a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rowhaul.store.row_parts import Arrays

Progress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class Counter:
    """Counts rows, and reports how many are done."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        """Count more rows."""
        self._done += count
        self._progress(self._done, self._total)

    def over(self, blocks: Iterable[Arrays]) -> Iterator[Arrays]:
        """Yield the same blocks, and count each when the next is asked for."""
        for block in blocks:
            yield block
            self.add(len(block["keys"]))
