"""Decoded rows that can be cut, joined and reordered before they become a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rowhaul.data.columns import Float32s, Ids, Int64s, latest_time, offsets_of
from rowhaul.data.samples import Samples
from rowhaul.data.targets import NO_TARGETS, Targets, join_targets


@dataclass(frozen=True)
class Block:
    """A run of decoded samples, column by column."""

    ids: tuple[Ids, ...]
    dense: Float32s  # samples x dense columns
    targets: Targets = NO_TARGETS
    times: Int64s | None = None  # of events, in seconds since 1970

    def __len__(self) -> int:
        return len(self.dense)

    def cut(self, first: int, last: int) -> Block:
        """The samples ``first`` to ``last`` (exclusive), without copying."""
        if first == 0 and last == len(self):
            return self
        return Block(
            ids=tuple(_cut(ids, first, last) for ids in self.ids),
            dense=self.dense[first:last],
            targets=self.targets.map(lambda one: one[first:last]),
            times=None if self.times is None else self.times[first:last],
        )

    def take(self, order: Int64s) -> Block:
        """The samples at the given positions, in that order."""
        return Block(
            ids=tuple(_take(ids, order) for ids in self.ids),
            dense=self.dense[order],
            targets=self.targets.map(lambda one: one[order]),
            times=None if self.times is None else self.times[order],
        )

    def to_samples(self, features: tuple[str, ...], first_index: int) -> Samples:
        """A batch that owns its memory, its samples numbered from ``first_index``."""
        lengths = np.ones((len(features), len(self)), np.int32)
        for row, ids in zip(lengths, self.ids, strict=True):
            if ids.offsets is not None:
                row[:] = np.diff(ids.offsets)
        return Samples(
            features=features,
            values=np.concatenate([ids.values for ids in self.ids]),
            lengths=lengths,
            dense=self.dense.copy(),
            index=np.arange(first_index, first_index + len(self), dtype=np.int64),
            **vars(self.targets.map(np.copy)),
            time=0 if self.times is None else newest_time(self.times),
        )


def newest_time(times: Int64s) -> int:
    """The time of the newest event, 0 if there is none; what has not happened yet does not count.

    Rows expire by it and it never goes back: one sample of 2038 would forget all of them, and then none.
    """
    return int(times[times <= latest_time()].max(initial=0))


def rechunk(blocks: Iterable[Block], size: int, first: int | None = None) -> Iterator[Block]:
    """The same samples in blocks of ``size``, the last one possibly shorter, the first one as given."""
    pieces: list[Block] = []
    num_waiting, wanted = 0, size if first is None else first
    for block in blocks:
        begin = 0
        while begin < len(block):
            end = min(len(block), begin + wanted - num_waiting)
            pieces.append(block.cut(begin, end))
            num_waiting += end - begin
            begin = end
            if num_waiting == wanted:
                yield join(pieces)
                pieces, num_waiting, wanted = [], 0, size
    if pieces:
        yield join(pieces)


def join(blocks: Sequence[Block]) -> Block:
    """The samples of several blocks, in order."""
    if len(blocks) == 1:
        return blocks[0]
    times = [block.times for block in blocks if block.times is not None]
    return Block(
        ids=tuple(_join_ids(parts) for parts in zip(*(block.ids for block in blocks), strict=True)),
        dense=np.concatenate([block.dense for block in blocks]),
        targets=join_targets([block.targets for block in blocks]),
        times=np.concatenate(times) if times else None,
    )


def _join_ids(parts: Sequence[Ids]) -> Ids:
    values = np.concatenate([ids.values for ids in parts])
    if all(ids.offsets is None for ids in parts):
        return Ids(values, None)
    lengths = [
        np.ones(len(ids.values), np.int64) if ids.offsets is None else np.diff(ids.offsets) for ids in parts
    ]
    return Ids(values, offsets_of(np.concatenate(lengths)))


def _cut(ids: Ids, first: int, last: int) -> Ids:
    if ids.offsets is None:
        return Ids(ids.values[first:last], None)
    offsets = ids.offsets[first : last + 1]
    return Ids(ids.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _take(ids: Ids, order: Int64s) -> Ids:
    if ids.offsets is None:
        return Ids(ids.values[order], None)
    lengths = np.diff(ids.offsets)[order]
    offsets = offsets_of(lengths)
    # The k-th id of a sample lies k behind the sample's first one, before the move and after it.
    shift = np.repeat(ids.offsets[order] - offsets[:-1], lengths)
    return Ids(ids.values[shift + np.arange(len(shift))], offsets)
