"""Which chunks go, which come back and which rows are forgotten: one pure function.

It sees utilities, presence and how much room there is, and nothing of memory. The same arguments give
the same answer wherever it is asked and in whatever order rows are listed, so that the ranks of a
cluster can each decide for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.hashing import draws_below
from rowhaul.pruning.ratios import ratios_by_place
from rowhaul.pruning.settings import PruneSettings

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

# A row that holds nothing and whose best chunk is below this part of the threshold is forgotten: at the
# default decay it would have to be read again within 230 steps to matter.
FAR_BELOW = 0.01


@dataclass(frozen=True)
class KnownRows:
    """All rows in the index, each once, in any order; utilities as they are now."""

    tables: Int64s
    keys: Int64s
    utilities: Floats  # rows x chunks
    present: Bools  # rows x chunks


@dataclass(frozen=True)
class Room:
    """How much may be held."""

    num_chunks: int  # in the pool
    num_entries: int  # in the index
    num_rows: int  # rows that there would be without pruning, forgotten ones too


@dataclass(frozen=True)
class ChunkNames:
    """Chunks by name: table, key and place in the row."""

    tables: Int64s
    keys: Int64s
    places: Int64s

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Decision:
    """What a pruning changes, evictions first; rows to forget hold nothing by then."""

    evict: ChunkNames
    admit: ChunkNames
    forget_tables: Int64s
    forget_keys: Int64s
    thresholds: Floats  # by place in the row
    num_crossing: int  # chunks on the wrong side of their threshold before
    enforced: bool


def decide(known: KnownRows, settings: PruneSettings, room: Room, seed: int, iteration: int) -> Decision:
    """Decide a pruning after step ``iteration``; never admits more than ``room.num_chunks`` in all."""
    order = _in_order(known.tables, known.keys)
    tables, keys = known.tables[order], known.keys[order]
    utilities, present = known.utilities[order], known.present[order]
    thresholds = find_thresholds(utilities, settings, room, seed, iteration)
    below, above = utilities < thresholds, utilities > thresholds
    num_crossing = int(np.count_nonzero(present & below) + np.count_nonzero(~present & above))
    enforced = num_crossing > settings.enforcement * utilities.size
    evicted = (present & below) if enforced else np.zeros_like(present)
    num_free = room.num_chunks - int(np.count_nonzero(present)) + int(np.count_nonzero(evicted))
    wanted = _sorted(-utilities, ~present & above)
    admitted = np.zeros_like(present)
    admitted.flat[wanted[: max(num_free, 0)]] = True
    # One for one: the best that found no room against the worst that were left below the threshold.
    others = wanted[max(num_free, 0) :]
    victims = _sorted(utilities, present & below & ~evicted)[: len(others)]
    evicted.flat[victims] = True
    admitted.flat[others[: len(victims)]] = True
    forgotten = _forgotten(utilities, (present & ~evicted) | admitted, thresholds, room)
    return Decision(
        evict=_names(tables, keys, evicted),
        admit=_names(tables, keys, admitted),
        forget_tables=tables[forgotten],
        forget_keys=keys[forgotten],
        thresholds=thresholds,
        num_crossing=num_crossing,
        enforced=enforced,
    )


def first_by(major: Int64s, minor: npt.NDArray[np.uint64], count: int) -> Int64s:
    """Positions of the first ``count`` by one number and then another: sorts these alone."""
    if count < len(major):
        last = np.partition(major, count - 1)[count - 1] if count else major.min()
        before, tied = np.flatnonzero(major < last), np.flatnonzero(major == last)
        num_tied = count - len(before)
        if num_tied < len(tied):
            tied = tied[np.argpartition(minor[tied], num_tied)[:num_tied]]
        chosen = np.concatenate([before, tied])
    else:
        chosen = np.arange(len(major))
    return chosen[np.lexsort((minor[chosen], major[chosen]))]


def _in_order(tables: Int64s, keys: Int64s) -> Int64s:
    """Positions of rows by table and key: table by table, since that sorts single numbers, which is quick."""
    order = np.argsort(tables, kind="stable")
    bounds = np.flatnonzero(np.diff(tables[order], prepend=-1, append=-1))
    for first, end in pairwise(bounds):
        some = order[first:end]
        order[first:end] = some[np.argsort(keys[some])]
    return order


def find_thresholds(
    utilities: Floats, settings: PruneSettings, room: Room, seed: int, iteration: int
) -> Floats:
    """The utility at which each place in a row is cut, from a sample of the rows given in order.

    As many chunks are above it as the room allows. Rows that were forgotten are below it, so the share to
    cut among those known is smaller than the share to prune of all.
    """
    num_known, num_chunks = utilities.shape
    thresholds = np.full(num_chunks, -np.inf, dtype=np.float32)
    if not num_known:
        return thresholds
    if settings.ratios == "adaptive":
        share = _share_to_cut(room.num_chunks, utilities.size)
        sampled = _sampled(utilities.reshape(-1), settings.sample, seed, iteration)
        thresholds[:] = _quantile(sampled, share)
        return thresholds
    everything = max(room.num_rows, num_known)
    ratio = max(0.0, 1 - room.num_chunks / (everything * num_chunks))
    for place, pruned in enumerate(ratios_by_place(settings.ratios, ratio, num_chunks)):
        share = _share_to_cut((1 - float(pruned)) * everything, num_known)
        sampled = _sampled(
            utilities[:, place], max(1, settings.sample // num_chunks), seed + place, iteration
        )
        thresholds[place] = _quantile(sampled, share)
    return thresholds


def _share_to_cut(num_kept: float, num_known: int) -> float:
    return max(0.0, 1 - num_kept / num_known)


def _sampled(utilities: Floats, size: int, seed: int, iteration: int) -> Floats:
    """A sample by counter, the same everywhere; all of them if there are no more than ``size``."""
    if len(utilities) <= size:
        return utilities
    return utilities[draws_below(len(utilities), size, seed, iteration)]


def _quantile(sampled: Floats, share: float) -> np.float32:
    """The value that ``share`` of the sample is below; of no share, below everything."""
    position = min(int(share * len(sampled)), len(sampled) - 1)
    if not position:
        return np.float32(-np.inf)
    return np.float32(np.partition(sampled, position)[position])


def _sorted(by: Floats, among: Bools) -> Int64s:
    """Flat positions of chunks from the smallest on, ties by table, key and place."""
    positions = np.flatnonzero(among)
    return positions[np.argsort(by.reshape(-1)[positions], kind="stable")]


def _forgotten(utilities: Floats, present: Bools, thresholds: Floats, room: Room) -> Int64s:
    """Rows that leave the index: those far below, and more until half of it is free for new ones."""
    holds_nothing = ~present.any(axis=1)
    best = utilities.max(axis=1, initial=0)
    lowest = float(thresholds.min(initial=np.inf))
    far = holds_nothing & (best <= FAR_BELOW * lowest)
    num_over = len(best) - int(np.count_nonzero(far)) - room.num_entries // 2
    if num_over > 0:
        others = _sorted(best, holds_nothing & ~far)
        far[others[:num_over]] = True
    return np.flatnonzero(far)


def _names(tables: Int64s, keys: Int64s, chosen: Bools) -> ChunkNames:
    rows, places = np.nonzero(chosen)
    return ChunkNames(tables[rows], keys[rows], places.astype(np.int64))
