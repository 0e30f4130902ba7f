"""What the reader makes of the ids in files: histories cut to their newest ids, negatives drawn.

Both happen before anything is planned, on the whole batch, so that every rank sees the same ids. A negative
is a function of the seed, the sample's place in the stream and the ids of the global batch, not of who trains
the sample. It is one of the ids that other samples of the batch have, and none that the sample itself has, as
its target or in a history. By default each distinct id is as likely as any other: drawn as often as they
occur, popular ids would be negatives as often as targets, and no model could learn that they are popular.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowhaul.data.block import Block
from rowhaul.data.columns import Ids, Int64s, offsets_of
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema

_TRIES = 16  # draws of a negative, until the sample does not have it


class FeatureMaker:
    """Cuts histories and draws negatives, as a schema asks for.

    Args:
        schema: of the samples.
        seed: of the draws.
    """

    def __init__(self, schema: Schema, seed: int) -> None:
        self._schema, self._seed = schema, seed
        self._limits = [column.max_length for column in schema.stored_ids]
        self._lock = threading.Lock()
        self.num_cut = 0  # histories that were longer than their limit
        self._told = False

    def samples(self, block: Block, first_index: int) -> Samples:
        """Make a batch of decoded rows, its samples numbered from ``first_index``."""
        ids = tuple(self._cut(one, limit) for one, limit in zip(block.ids, self._limits, strict=True))
        samples = replace(block, ids=ids).to_samples(self._schema.stored_features, first_index)
        return draw_negatives(samples, self._schema, self._seed) if self._schema.negatives else samples

    def notes(self) -> list[str]:
        """Return a line on histories that were cut, once."""
        with self._lock:
            if not self.num_cut or self._told:
                return []
            self._told = True
        limits = {one.name: one.max_length for one in self._schema.stored_ids if one.max_length}
        return [f"histories longer than their max_length {limits} are cut to the newest ids"]

    def _cut(self, ids: Ids, limit: int | None) -> Ids:
        if limit is None or ids.offsets is None:
            return ids
        lengths = np.diff(ids.offsets)
        too_long = int(np.count_nonzero(lengths > limit))
        if not too_long:
            return ids
        with self._lock:
            self.num_cut += too_long
        return newest_ids(ids, limit)


def newest_ids(ids: Ids, limit: int) -> Ids:
    """Keep the last ``limit`` ids of each sample."""
    if ids.offsets is None:
        return ids
    kept = np.minimum(np.diff(ids.offsets), limit)
    offsets = offsets_of(kept)
    # As far from a sample's end as they will be.
    places = np.arange(offsets[-1]) + np.repeat(ids.offsets[1:] - offsets[1:], kept)
    return Ids(ids.values[places], offsets)


def draw_negatives(samples: Samples, schema: Schema, seed: int) -> Samples:
    """Add the features that a schema draws, in the schema's order."""
    by_name = dict(zip(samples.features, samples.ids_of_features(), strict=True))
    lengths = dict(zip(samples.features, samples.lengths, strict=True))
    for number, column in enumerate(schema.negatives):
        pool = by_name[column.negatives_of]
        if column.draw == "even":
            pool = np.unique(pool)
        each = lengths[column.negatives_of] * column.count
        owner = np.repeat(np.arange(len(samples)), each)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)
        own = _own_rows(by_name, lengths, schema, column.table)
        drawn = _draw(samples.index[owner], place, seed, number, pool, owner, own)
        by_name[column.name], lengths[column.name] = drawn, each.astype(np.int32)
    return replace(
        samples,
        features=schema.features,
        values=np.concatenate([by_name[name] for name in schema.features]),
        lengths=np.stack([lengths[name] for name in schema.features]),
    )


def _own_rows(
    by_name: dict[str, Int64s], lengths: dict[str, npt.NDArray[np.int32]], schema: Schema, table: str
) -> tuple[Int64s, Int64s]:
    """Which sample has which ids of a table: both sorted, by id."""
    features = [one.name for one in schema.stored_ids if one.table == table]
    keys = np.concatenate([by_name[name] for name in features])
    owners = np.concatenate([np.repeat(np.arange(len(lengths[name])), lengths[name]) for name in features])
    order = np.lexsort((owners, keys))
    return keys[order], owners[order]


def _draw(
    index: Int64s,
    place: Int64s,
    seed: int,
    number: int,
    pool: Int64s,
    owner: Int64s,
    own: tuple[Int64s, Int64s],
) -> Int64s:
    """One of ``pool`` for every (sample, place), again while the sample has it; the last try stays."""
    drawn = np.zeros(len(index), np.int64)
    again = np.arange(len(index))
    with np.errstate(over="ignore"):  # it wraps
        stream = _mixed(np.array([seed % 2**64], np.uint64)) + np.uint64(number)
        words = _mixed(_mixed(index.astype(np.uint64) + _mixed(stream)) + place.astype(np.uint64))
        for attempt in range(_TRIES):
            if not len(again):
                break
            chosen = _mixed(words[again] + np.uint64(attempt)) % np.uint64(len(pool))
            drawn[again] = pool[chosen.astype(np.int64)]
            again = again[_has(drawn[again], owner[again], own)]
    return drawn


def _has(keys: Int64s, owners: Int64s, own: tuple[Int64s, Int64s]) -> npt.NDArray[np.bool_]:
    """Whether each sample has an id."""
    every, theirs = own
    first, last = np.searchsorted(every, keys), np.searchsorted(every, keys, side="right")
    found = np.zeros(len(keys), np.bool_)
    # Within one key owners ascend: find the place of ours by halving, all at once.
    while (open_ := first < last).any():
        middle = (first + last) // 2
        value = theirs[np.minimum(middle, len(theirs) - 1)]
        found |= open_ & (value == owners)
        first = np.where(open_ & (value < owners), middle + 1, first)
        last = np.where(open_ & (value >= owners), middle, last)
    return found


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_words: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed_words
