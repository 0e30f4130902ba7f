"""Lines of JSON from a pipe, such as standard input: one sample a line."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from rowhaul.data.schema import Schema
from rowhaul.data.sources.messages import MessageDecoder
from rowhaul.data.sources.source import POLL_SECONDS, Chunk, Position

STANDARD_INPUT = "-"
_READ_BYTES = 1 << 20


class LinesSource:
    """Reads a file descriptor; see `Source`.

    The position is the number of lines. A run that resumes is given the same lines again, from the first:
    those before the position are skipped.
    """

    name = "standard input"
    patience = 100

    def __init__(self, schema: Schema, kinds: dict[str, str], descriptor: int = 0) -> None:
        self.kinds, self.notes = dict(kinds), deque[str]()
        self._decoder = MessageDecoder(schema, self.kinds)
        self._descriptor = descriptor

    def read(self, position: Position | None) -> Iterator[Chunk | None]:
        """Yield lines as they come, until the writer closes its end."""
        skip = position["lines"] if position else 0
        number, rest, ended = 0, b"", False
        while not ended:
            data = self._wait()
            if data is None:
                yield None
                continue
            ended = not data
            *lines, rest = (rest + data).split(b"\n")
            if ended and rest:
                lines.append(rest)
            first = number
            number += len(lines)
            if first < skip and (number >= skip or ended):
                self.notes.append(_skipped(number, skip))
            lines, first = lines[max(0, skip - first) :], max(first, skip)
            if lines:
                decoded = self._decoder.decode(lines, partial(_name, first))
                after = partial(_after, first, decoded.places)
                yield Chunk(decoded.block, after, decoded.set_aside)

    def event_time(self, position: Position) -> float | None:
        """Return nothing: samples do not say when they happened."""
        return None

    def saved(self, position: Position) -> None:
        """Do nothing: a pipe cannot be told."""

    def close(self) -> None:
        """Do nothing: the descriptor belongs to the caller."""

    def _wait(self) -> bytes | None:
        """Return what has come, empty at the end, or None for nothing yet."""
        parts: list[bytes] = []
        # A pipe holds little at a time, and many lines together are decoded faster.
        while sum(map(len, parts)) < _READ_BYTES:
            wait = 0.0 if parts else POLL_SECONDS
            if not select.select([self._descriptor], [], [], wait)[0]:
                break
            read = os.read(self._descriptor, _READ_BYTES)
            if not read and not parts:
                return b""
            if not read:
                break  # the end, which is there the next time, too
            parts.append(read)
        return b"".join(parts) if parts else None


def _skipped(number: int, skip: int) -> str:
    """Say which lines a resumed run has passed over: only their sender knows whether they are the same."""
    if number >= skip:
        return f"the first {skip:,} lines are passed over: the model has learned from them before"
    return (
        f"standard input has ended after {number:,} lines, which were passed over, since the run was stopped "
        f"after line {skip:,}; to resume, send the same lines again from the first"
    )


def _name(first: int, place: int) -> str:
    return f"line {first + place + 1:,}"


def _after(first: int, places: Sequence[int], count: int) -> Position:
    return {"lines": first + places[count - 1] + 1}
