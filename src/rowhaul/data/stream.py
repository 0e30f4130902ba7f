"""Batches of samples streamed from Parquet files, in an order that every rank can recompute.

The stream is one sequence of samples: the epochs one after the other. A checkpoint needs only the position in
it: from the files' footers alone the stream finds the row group, and in a shuffled stream the window, of a
position, and continues with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

import numpy as np
import xxhash

from rowhaul._activity import progressed
from rowhaul.data.block import Block, rechunk
from rowhaul.data.column_shares import ColumnShare, DecodedColumns
from rowhaul.data.columns import Int64s
from rowhaul.data.contents import ContentDigests, FileFacts
from rowhaul.data.files import Files, expand_files
from rowhaul.data.negatives import FeatureMaker
from rowhaul.data.parquet import OtherReader, ParquetRows, Sharing
from rowhaul.data.prefetch import prefetch
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError, DataError

PREFETCHED_BATCHES = 4

Prepared = TypeVar("Prepared")


class SampleStream:
    """The samples of some Parquet files in batches of the global batch size.

    The last batch of an epoch may be shorter. Each iteration begins at ``start`` again; ``position``
    belongs to the latest one and counts the samples up to and including its latest batch.
    ``num_samples`` is the size of one epoch.

    Args:
        files: A Parquet file, a folder, a glob, or a list of those; see `expand_files`.
        schema: Which columns to read and what they mean.
        batch_size: Samples in a batch, over all workers.
        epochs: Passes over the files.
        shuffle_rows: 0 keeps the files' order. W > 0 permutes the row groups of all files, then
            the samples within windows of W, differently in every epoch; W samples are held in memory.
        seed: Of the shuffle, and of negatives; the same order on every machine.
        start: Samples already consumed: the `position` of an earlier run.
        limit: Stop at this position of the stream (counted like ``start``, over all epochs).
        require_label: False leaves the label unread: batches have ``labels=None``.
    """

    is_live = False  # its end is known

    def __init__(
        self,
        files: Files,
        schema: Schema,
        batch_size: int,
        *,
        epochs: int = 1,
        shuffle_rows: int = 0,
        seed: int = 0,
        start: int = 0,
        limit: int | None = None,
        require_label: bool = True,
    ) -> None:
        check_schema(schema)
        batch_size, epochs = _whole("batch_size", batch_size, 1), _whole("epochs", epochs, 1)
        shuffle_rows, seed = _whole("shuffle_rows", shuffle_rows, 0), _whole("seed", seed)
        start, limit = _whole("start", start, 0), limit if limit is None else _whole("limit", limit, 1)
        self.files = expand_files(files)
        self.schema = schema
        self.batch_size = batch_size
        self.position = start
        self._rows = ParquetRows(self.files, schema, require_label)
        self._group_rows = np.array([group.num_rows for group in self._rows.row_groups], np.int64)
        if not len(self._group_rows):
            raise DataError(f"the data files hold no rows: {', '.join(map(str, self.files))}")
        self.num_samples = int(self._group_rows.sum())
        self._shuffle_rows = shuffle_rows
        self._seed = seed
        self._maker = FeatureMaker(schema, seed)
        self._start = start
        self._require_label = require_label
        self._sharing: Sharing | None = None  # of the next iteration
        whole = epochs * self.num_samples
        self._end = whole if limit is None else min(whole, limit)

    @property
    def key_kinds(self) -> dict[str, str]:
        """What the ids of each feature are (`rowhaul._id_kinds`): the integer 7 and "7" are two keys."""
        return self._rows.key_kinds

    @property
    def num_cut(self) -> int:
        """Histories read so far that were longer than their limit."""
        return self._maker.num_cut

    def news(self) -> list[str]:
        """Return what is worth telling of the samples read since the last call: histories that were cut."""
        return self._maker.notes()

    @property
    def fingerprint(self) -> str:
        """Changes with the sizes of the files and of their row groups."""
        sizes = [one.bytes for one in self.file_facts]
        return xxhash.xxh3_64_hexdigest(repr((sizes, self._group_rows.tolist())).encode())

    def files_digest(self) -> bytes:
        """16 bytes that are the same on ranks that opened the same files with the same schema."""
        files = [(facts.bytes, facts.rows, facts.footer) for facts in self.file_facts]
        described = (files, self.schema.to_dict(), self._require_label)
        return xxhash.xxh3_128_digest(repr(described).encode())

    def column_costs(self) -> dict[str, int]:
        """What decoding takes, roughly, by column."""
        return self._rows.column_costs()

    def share_columns(self, own: ColumnShare, others: Sequence[OtherReader]) -> None:
        """In the next iteration decode only a share of the columns: others decode the rest, until it ends."""
        self._sharing = Sharing(own, tuple(others))

    def read_columns(self, share: ColumnShare, place: int, skip: int) -> Iterator[DecodedColumns]:
        """A share of the columns of a row group, after its first ``skip`` rows."""
        return self._rows.read_columns(share, place, skip)

    @property
    def file_facts(self) -> list[FileFacts]:
        """What the files are, in order."""
        return self._rows.file_facts

    @property
    def contents(self) -> ContentDigests:
        """What was in the row groups read so far; one with other values is an error."""
        return self._rows.contents

    def read_again(self, files: Collection[int]) -> None:
        """Compare the row groups of some files with what is known of them."""
        for place, group in enumerate(self._rows.row_groups):
            if group.file in files and (group.file, group.group) in self.contents.known:
                for _ in self._rows.read(place):
                    progressed()

    @property
    def num_batches(self) -> int:
        """Batches from ``start`` to the end: how many an iteration yields."""
        return sum(-(-(last - first) // self.batch_size) for _, first, last in self._epochs())

    def from_beginning(self, limit: int) -> SampleStream:
        """Another stream over the first ``limit`` samples, of the first epoch at most, in the same order."""
        return self.part(0, min(limit, self.num_samples))

    def part(self, start: int, end: int) -> SampleStream:
        """Another stream over samples ``start`` to ``end``, counted from the beginning, in the same order."""
        return SampleStream(
            self.files,
            self.schema,
            self.batch_size,
            epochs=-(-end // self.num_samples),
            shuffle_rows=self._shuffle_rows,
            seed=self._seed,
            start=start,
            limit=end,
            require_label=self._require_label,
        )

    def __iter__(self) -> Iterator[Samples]:
        return self.prepared(lambda samples: samples)

    def prepared(self, prepare: Callable[[Samples], Prepared]) -> Generator[Prepared, None, None]:
        """Apply ``prepare`` to every batch, ahead of use, in the thread that loads them."""
        self.position = self._start
        sharing, self._sharing = self._sharing, None
        made = ((len(batch), prepare(batch)) for batch in self._batches(sharing))
        # Other readers are told first: the thread that loads may be waiting for them.
        with closing(prefetch(made, PREFETCHED_BATCHES)) as prepared, stopping(sharing):
            for count, one in prepared:
                self.position += count
                yield one

    def _epochs(self) -> Iterator[tuple[int, int, int]]:
        """Each epoch that is read, with the part of it from ``first`` to ``last``."""
        position = self._start
        while position < self._end:
            epoch, first = divmod(position, self.num_samples)
            last = min(self.num_samples, self._end - epoch * self.num_samples)
            yield epoch, first, last
            position = epoch * self.num_samples + last

    def _batches(self, sharing: Sharing | None) -> Iterator[Samples]:
        try:
            for epoch, first, last in self._epochs():
                read = self._shuffled if self._shuffle_rows else self._in_files_order
                position = epoch * self.num_samples + first
                for block in rechunk(read(epoch, first, last, sharing), self.batch_size):
                    yield self._maker.samples(block, position)
                    position += len(block)
        finally:
            for one in () if sharing is None else sharing.others:
                one.close()

    def _in_files_order(self, epoch: int, first: int, last: int, sharing: Sharing | None) -> Iterator[Block]:
        return self._in_order(first, last, np.arange(len(self._group_rows)), sharing)

    def _in_order(self, first: int, last: int, order: Int64s, sharing: Sharing | None) -> Iterator[Block]:
        """Samples ``first`` to ``last`` of the row groups in the given order."""
        ends = np.cumsum(self._group_rows[order])
        position = first
        for place in range(int(np.searchsorted(ends, first, side="right")), len(order)):
            if position >= last:
                return
            number = int(order[place])
            begin = int(ends[place]) - int(self._group_rows[number])
            for block in self._rows.read(number, position - begin, sharing):
                yield block.cut(0, min(len(block), last - position))
                position += len(block)
                if position >= last:
                    break

    def _shuffled(self, epoch: int, first: int, last: int, sharing: Sharing | None) -> Iterator[Block]:
        order = self._permutation(len(self._group_rows), epoch, 0)
        size = self._shuffle_rows
        window = first // size
        whole_windows_end = min(self.num_samples, -(-last // size) * size)
        for block in rechunk(self._in_order(window * size, whole_windows_end, order, sharing), size):
            begin = window * size
            window += 1
            mixed = block.take(self._permutation(len(block), epoch, window))
            yield mixed.cut(max(0, first - begin), min(len(mixed), last - begin))

    def _permutation(self, count: int, epoch: int, number: int) -> Int64s:
        """The ``number``-th permutation of an epoch: 0 orders row groups, 1 and up the windows.

        Sorts raw words of a counter-based generator, whose bits NumPy keeps across versions.
        """
        words = np.random.Philox(
            counter=np.array([0, 0, 0, number], np.uint64),
            key=np.array([self._seed % 2**64, epoch], np.uint64),
        )
        return np.argsort(words.random_raw(count), kind="stable")


@contextmanager
def stopping(sharing: Sharing | None) -> Iterator[None]:
    """Stop the other readers on the way out."""
    try:
        yield
    finally:
        for one in () if sharing is None else sharing.others:
            one.stop()


def check_schema(schema: object) -> None:
    """Refuse the path of a schema where the schema itself is needed."""
    if not isinstance(schema, Schema):
        raise ConfigError(
            f"the schema is {schema!r}; it must be a rowhaul.data.Schema: read a file with Schema.read(path)"
        )


def _whole(name: str, given: int, least: int | None = None) -> int:
    """Return a whole number as Python's own: sums and seeds of NumPy's overflow."""
    if not isinstance(given, int | np.integer):
        raise ConfigError(f"{name} is {given!r}; it must be a whole number")
    if least is not None and given < least:
        raise ConfigError(f"{name} is {given}; it must be at least {least}")
    return int(given)
