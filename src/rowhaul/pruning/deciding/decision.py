"""Which chunks go, which come back and which rows are forgotten: one pure function.

It sees utilities, presence and how much room there is, and nothing of memory. The same rows give the same
answer wherever it is asked and in whatever order they are listed, so every rank of a cluster decides alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.hashing import UInt64s, draws_below
from rowhaul.pruning.settings import PruneSettings

Int64s = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]  # int64 counts of accesses, or float32 sums of norms; none is negative
Bools = npt.NDArray[np.bool_]

# A row that holds nothing and whose best chunk is below this part of the threshold is forgotten.
FAR_BELOW = 0.01
_NOTHING = -1  # a threshold that nothing is below
_POWER = 0.5  # the exponent of `power` ratios: they rise steeply and then level off, as in FIITED's figure 7
_CAP = 0.95  # no place in a row is pruned more than this, unless the whole must be


@dataclass(frozen=True)
class KnownRows:
    """All rows in the index, each once, in any order; utilities as they are now."""

    hashes: UInt64s  # of table and key, different for different rows
    utilities: Numbers  # rows x chunks, or rows x 1 where all chunks of a row have the same
    present: Bools  # rows x chunks


@dataclass(frozen=True)
class Room:
    """How much may be held."""

    num_chunks: int  # in the pool
    num_entries: int  # in the index
    num_rows: int  # rows that there would be without pruning, forgotten ones too


@dataclass(frozen=True)
class Decision:
    """What a pruning changes, evictions first; rows to forget hold nothing by then.

    Rows are given by their position among the known ones, ascending.
    """

    evict: Bools  # rows x chunks
    admit: Bools  # rows x chunks
    forget: Int64s  # rows
    thresholds: Numbers  # by place in the row
    num_crossing: int  # chunks on the wrong side of their threshold before
    enforced: bool


def decide(known: KnownRows, settings: PruneSettings, room: Room, seed: int, iteration: int) -> Decision:
    """Decide a pruning after step ``iteration``; never admits more than ``room.num_chunks`` in all."""
    order = np.argsort(known.hashes)  # ties are broken by it: no table comes before another
    present = known.present[order]
    utilities = np.broadcast_to(known.utilities[order], present.shape)
    thresholds = find_thresholds(utilities, settings, room, seed, iteration)
    below, above = utilities < thresholds, utilities > thresholds
    num_crossing = int(np.count_nonzero(present & below) + np.count_nonzero(~present & above))
    enforced = num_crossing > settings.enforcement * utilities.size
    evicted = (present & below) if enforced else np.zeros_like(present)
    num_free = room.num_chunks - int(np.count_nonzero(present)) + int(np.count_nonzero(evicted))
    wanted = _sorted(utilities, ~present & above, descending=True)
    admitted = np.zeros_like(present)
    admitted.flat[wanted[: max(num_free, 0)]] = True
    # One for one: the best that found no room against the worst that were left below the threshold.
    others = wanted[max(num_free, 0) :]
    victims = _sorted(utilities, present & below & ~evicted)[: len(others)]
    evicted.flat[victims] = True
    admitted.flat[others[: len(victims)]] = True
    forgotten = _forgotten(utilities, (present & ~evicted) | admitted, thresholds, room)
    evict, admit = np.empty_like(present), np.empty_like(present)
    evict[order], admit[order] = evicted, admitted
    return Decision(evict, admit, np.sort(order[forgotten]), thresholds, num_crossing, enforced)


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


def find_thresholds(
    utilities: Numbers, settings: PruneSettings, room: Room, seed: int, iteration: int
) -> Numbers:
    """The utility at which each place in a row is cut, from a sample of the rows given in order.

    As many chunks are above it as the room allows. Rows that were forgotten are below it, so the share to
    cut among those known is smaller than the share to prune of all.
    """
    num_known, num_chunks = utilities.shape
    thresholds = np.full(num_chunks, _NOTHING, dtype=utilities.dtype)
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


def ratios_by_place(shape: str, ratio: float, num_chunks: int) -> npt.NDArray[np.float64]:
    """The share to prune at each place in a row, later ones more, with ``ratio`` as their mean."""
    places = (np.arange(num_chunks) + 0.5) / num_chunks
    if shape == "linear":
        return ratio + 2 * (places - 0.5) * min(ratio, 1 - ratio) / 2
    return _power(places, ratio)


def _power(places: npt.NDArray[np.float64], ratio: float) -> npt.NDArray[np.float64]:
    """``c * x**_POWER`` cut at the cap, with ``c`` such that the mean is ``ratio`` all the same."""
    cap = max(_CAP, ratio)
    low, high = 0.0, cap / float(places[0] ** _POWER)
    for _ in range(200):  # bisection: the mean rises with c, and at `high` every place is at the cap
        middle = (low + high) / 2
        if float(np.minimum(cap, middle * places**_POWER).mean()) < ratio:
            low = middle
        else:
            high = middle
    return np.minimum(cap, high * places**_POWER)


def _share_to_cut(num_kept: float, num_known: int) -> float:
    return max(0.0, 1 - num_kept / num_known)


def _sampled(utilities: Numbers, size: int, seed: int, iteration: int) -> Numbers:
    """A sample by counter, the same everywhere; all of them if there are no more than ``size``."""
    if len(utilities) <= size:
        return utilities
    return utilities[draws_below(len(utilities), size, seed, iteration)]


def _quantile(sampled: Numbers, share: float) -> Any:
    """The value that ``share`` of the sample is below; of no share, below everything."""
    position = min(int(share * len(sampled)), len(sampled) - 1)
    return np.partition(sampled, position)[position] if position else _NOTHING


def _sorted(by: Numbers, among: Bools, *, descending: bool = False) -> Int64s:
    """Flat positions of chunks, or of rows, by a number, ties by hash and place."""
    values = by[among]
    return np.flatnonzero(among)[np.argsort(-values if descending else values, kind="stable")]


def _forgotten(utilities: Numbers, present: Bools, thresholds: Numbers, room: Room) -> Int64s:
    """Rows that leave the index: those far below, and more until half of it is free for new ones."""
    holds_nothing = ~present.any(axis=1)
    best = utilities.max(axis=1)
    lowest = float(thresholds.min())
    far = holds_nothing & (best <= FAR_BELOW * lowest)
    num_over = len(best) - int(np.count_nonzero(far)) - room.num_entries // 2
    if num_over > 0:
        others = _sorted(best, holds_nothing & ~far)
        far[others[:num_over]] = True
    return np.flatnonzero(far)
