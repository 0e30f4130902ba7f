"""`Source`: where the samples of a stream come from.

A source reads on from a position, which is plain JSON and belongs to the checkpoint: what is saved contains
exactly the samples before it. Another kind of stream is one more file with these three methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rowhaul.data.block import Block

Position = dict[str, Any]
POLL_SECONDS = 0.1  # how long a source waits for samples before it says that there are none


@dataclass(frozen=True)
class SetAside:
    """A message or file that cannot be trained on."""

    where: str
    why: str
    content: str = ""


@dataclass(frozen=True)
class Chunk:
    """Samples that were read together.

    ``after(n)`` is the position after the first ``n`` of them, ``n`` > 0. What was set aside is given with
    the number of samples of the chunk that came before it.
    """

    block: Block
    after: Callable[[int], Position]
    set_aside: Sequence[tuple[int, SetAside]] = ()


class Source(Protocol):
    """Samples in an order that does not change, however often they are read.

    Attributes:
        name: for messages.
        kinds: what the ids of each feature are (`rowhaul._id_kinds`), as far as known; grows while reading.
        notes: what a person should know, oldest first; read by another thread.
        patience: how many messages without a single sample among them are an error.
    """

    name: str
    kinds: dict[str, str]
    notes: deque[str]
    patience: int

    def read(self, position: Position | None) -> Iterator[Chunk | None]:
        """Yield what comes after a position, None: from the beginning; ends where the source ends.

        Yields None whenever nothing has come for `POLL_SECONDS`. Reads ahead of what is asked for only within
        bounds, so that a writer that is too fast has to wait, or to keep what was not read yet.
        """

    def event_time(self, position: Position) -> float | None:
        """Return when the newest event before a position happened, in seconds since 1970.

        None: the source cannot know; 0: not yet.
        """
        return None

    def saved(self, position: Position) -> None:
        """Take note that a checkpoint holds everything up to a position; called from any thread."""

    def close(self) -> None:
        """Free the source, after reading has ended."""
