"""`LiveStream`: the samples of a `Source` in batches, cut by count alone unless asked otherwise.

A batch is full, however its samples arrived, so that reading the same samples again gives the same batches.
Only the last batch before the end is shorter, and those that ``max_wait`` cuts, which are counted.

Where the schema has no time, that of a batch is when its newest sample came: as the source says, so that
reading it again gives the same, or else by the clock of the process that reads, for all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rowhaul._activity import progressed
from rowhaul.data.block import Block, join
from rowhaul.data.columns import latest_time
from rowhaul.data.contents import FileFacts
from rowhaul.data.negatives import FeatureMaker
from rowhaul.data.prefetch import prefetch
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.sources.source import Position, SetAside, Source
from rowhaul.errors import DataError

PREFETCHED_BATCHES = 4
_LOOK_SECONDS = 1.0  # without a batch, until the consumer may look around
UNKNOWN_END = 1 << 60  # batches of a stream whose end is not known
_EARLIEST = 1e9  # in 2001: seconds since 1970 before it are no time, but a number that a producer chose
_TOLD_ONE_BY_ONE, _TOLD_EVERY = 10, 1000  # of what is set aside

Prepared = TypeVar("Prepared")


class Idle:
    """Yielded in place of a batch while samples are too few for one: the consumer may look around then."""


IDLE = Idle()


@dataclass(frozen=True)
class _Cut:
    """A batch, and the position after it; ``total`` are the samples of the run so far."""

    samples: Samples
    total: int
    position: Position
    kinds: dict[str, str]


class LiveStream:
    """The samples of a source in batches of the global batch size, with the attributes of `SampleStream`.

    Args:
        source: where they come from.
        schema: what they mean.
        batch_size: samples in a batch, over all workers.
        position: of an earlier run: what `position` was after its last batch.
        samples: trained by that run.
        kinds: of the ids trained on before; grows with what is read.
        seed: of the run, which negatives are drawn by.
        max_wait: cut a batch when its first sample has waited so many seconds; 0: never.
        stop_when_idle: end when nothing has come for so many seconds; 0: never.
    """

    num_samples = 0  # of an epoch: there is none
    num_batches = UNKNOWN_END
    is_live = True

    def __init__(
        self,
        source: Source,
        schema: Schema,
        batch_size: int,
        *,
        position: Position | None = None,
        samples: int = 0,
        kinds: dict[str, str] | None = None,
        seed: int = 0,
        max_wait: float = 0.0,
        stop_when_idle: float = 0.0,
    ) -> None:
        self.source, self.schema, self.batch_size = source, schema, batch_size
        self.position: Position = position or {"source": None, "set_aside": 0, "early_cuts": 0}
        self.key_kinds = {} if kinds is None else kinds
        self.set_aside: deque[SetAside] = deque()  # not reported yet
        self._maker = FeatureMaker(schema, seed)
        self._samples, self._max_wait, self._stop_when_idle = samples, max_wait, stop_when_idle
        self._num_aside, self._num_early = self.position["set_aside"], self.position["early_cuts"]
        self._came: int = self.position.get("came", 0)  # when the newest sample did, in seconds since 1970
        self._barren = 0  # set aside before the first sample
        self.ended_idle = False  # because nothing came, which `stop_when_idle` asks for
        self.stopped = False  # `should_stop` has ended it for a cluster
        self._is_unwanted = False
        self.should_stop: Callable[[], bool] = lambda: False  # asked while a cluster waits for samples
        self.on_idle: Callable[[], None] = lambda: None  # called meanwhile, in the thread that reads
        self._ahead: deque[_Cut] = deque()  # given to a cluster, which has not trained them yet

    @property
    def files(self) -> list[str]:
        """The source, for messages."""
        return [self.source.name]

    @property
    def file_facts(self) -> list[FileFacts]:
        """None: the position says what was read."""
        return []

    @property
    def fingerprint(self) -> str:
        """The source."""
        return self.source.name

    def prepared(self, prepare: Callable[[Samples], Prepared]) -> Generator[Prepared | Idle, None, None]:
        """Apply ``prepare`` to every batch, ahead of use, in the thread that reads; `IDLE` if none is due."""
        made = ((cut, None if isinstance(cut, Idle) else prepare(cut.samples)) for cut in self._cuts())
        for cut, one in prefetch(made, PREFETCHED_BATCHES):
            if isinstance(cut, Idle) or one is None:
                yield IDLE
                continue
            self.position = cut.position
            self.key_kinds.update(cut.kinds)
            yield one

    def __iter__(self) -> Iterator[Samples]:
        """Yield batches to a cluster, which plans ahead; `reached` tells how far it has come.

        Waiting for samples is no standstill. It ends when the run is to stop, or nobody wants more: nothing
        else would.
        """
        for cut in prefetch(self._cuts(), PREFETCHED_BATCHES):
            if not isinstance(cut, Idle):
                self._ahead.append(cut)
                yield cut.samples
            else:
                self.on_idle()
                if self._is_unwanted or self.should_stop():
                    self.stopped = not self._is_unwanted
                    return
            progressed()

    def end_waiting(self) -> None:
        """End the iteration of a cluster, which wants no more, if it waits for samples; from any thread."""
        self._is_unwanted = True

    def reached(self, samples: int) -> None:
        """Set the position to that after so many samples of the run, which a cluster has trained."""
        while self._ahead and self._ahead[0].total <= samples:
            cut = self._ahead.popleft()
            self.position = cut.position
            self.key_kinds.update(cut.kinds)

    @property
    def event_time(self) -> float | None:
        """When the newest event that was trained on happened, in seconds since 1970, if the source knows."""
        position = self.position["source"]
        return None if position is None else self.source.event_time(position) or None

    def saved(self, position: Position) -> None:
        """Take note that a checkpoint holds everything up to a position."""
        if position["source"] is not None:
            self.source.saved(position["source"])

    def news(self) -> list[str]:
        """Return lines on what happened since the last call: what was set aside, and notes of the source."""
        notes = []
        with contextlib.suppress(IndexError):  # none is left; another thread may have taken the last
            while True:
                notes.append(self.source.notes.popleft())
        return notes

    def _cuts(self) -> Iterator[_Cut | Idle]:
        pieces: list[Block] = []
        count, began, heard = 0, 0.0, time.monotonic()
        looked = heard  # when something was yielded
        position: Position | None = None  # after the samples in pieces
        for chunk in self.source.read(self.position["source"]):
            now = time.monotonic()
            if chunk is None:
                if self._stop_when_idle and now - heard >= self._stop_when_idle:
                    self.ended_idle = True
                    break
                if count and self._max_wait and now - began >= self._max_wait:
                    yield self._cut(pieces, position, early=True)
                    pieces, count, heard = [], 0, time.monotonic()
                yield IDLE
                looked = time.monotonic()
                continue
            heard, first, aside = now, 0, deque(chunk.set_aside)
            while first < len(chunk.block):
                if not count:
                    began = time.monotonic()
                last = min(len(chunk.block), first + self.batch_size - count)
                while aside and aside[0][0] < last:
                    self._put_aside(aside.popleft()[1])
                pieces.append(chunk.block.cut(first, last))
                count, first, position = count + last - first, last, chunk.after(last)
                if count == self.batch_size:
                    yield self._cut(pieces, position, early=False)
                    pieces, count, heard = [], 0, time.monotonic()
                    looked = heard
            for _, one in aside:
                self._put_aside(one)
            if count and self._max_wait and time.monotonic() - began >= self._max_wait:
                yield self._cut(pieces, position, early=True)
                pieces, count, heard = [], 0, time.monotonic()
                looked = heard
            if time.monotonic() - looked >= _LOOK_SECONDS:  # much is set aside, or samples only trickle
                yield IDLE
                looked = heard = time.monotonic()
        if count:
            yield self._cut(pieces, position, early=False)

    def _cut(self, pieces: list[Block], position: Position | None, early: bool) -> _Cut:
        block = join(pieces)
        samples = self._maker.samples(block, self._samples)
        if self.schema.time is None and position is not None:
            self._came = max(self._came, self._time_of(position))
            samples = replace(samples, time=self._came)
        self._samples += len(block)
        self._barren = -1
        if early:
            self._num_early += 1
            if self._num_early == 1:
                self.source.notes.append(
                    f"a batch was cut at {len(block):,} of {self.batch_size:,} samples after "
                    f"{self._max_wait:g}s (--max-wait): a replay may cut elsewhere, and learn other bits"
                )
        counts: dict[str, Any] = {"set_aside": self._num_aside, "early_cuts": self._num_early}
        counts["came"] = self._came
        return _Cut(samples, self._samples, {"source": position, **counts}, dict(self.source.kinds))

    def _time_of(self, position: Position) -> int:
        """Return when the newest sample before a position came; the clock says it where the source cannot."""
        found = self.source.event_time(position)
        if found is None or 0 < found < _EARLIEST or found > latest_time():
            found = time.time()
        return int(found)

    def _put_aside(self, one: SetAside) -> None:
        self._num_aside += 1
        self.set_aside.append(one)
        if self._num_aside <= _TOLD_ONE_BY_ONE or self._num_aside % _TOLD_EVERY == 0:
            self.source.notes.append(f"set aside ({self._num_aside:,} so far): {one.where}: {one.why}")
        if self._barren >= 0:
            self._barren += 1
            if self._barren >= self.source.patience and not self._samples:
                raise DataError(
                    f"{self.source.name} does not fit the schema: of its first {self._barren:,} messages or "
                    f"files none can be trained on; the last, {one.where}: {one.why}"
                )
