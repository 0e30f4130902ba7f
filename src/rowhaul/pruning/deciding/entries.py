"""Entries of tracked rows: which chunks they hold, and how useful they have been.

By default the utility of a row is a decayed count of its accesses, a fixed-point number of 32 bits. An access
adds `ONE_ACCESS`; before that the count decays for the steps since the row was last read, by a whole-number
product that drops the fraction. So it is a function of when, and how often, the row was read: the same bits
in one process and on every rank of a cluster.

The utilities of gradients (FIITED's) are sums of floating-point norms, one for each chunk, and decay alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import MOST, ONE_ACCESS, add_norms, count_accesses, read_slots
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.arena import RecordArena

Int64s = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

ABSENT, THERE = -1, 0  # slots; where chunks have records, these are the numbers from 0 on
# Blocks of chunks and of entries: small enough not to matter beside a pruned table.
BLOCK_BYTES = 1 << 16


class ShrinkingArena(RecordArena):
    """Records that can become narrower where they are."""

    def __init__(self, width: int, dtype: npt.DTypeLike) -> None:
        super().__init__(width, dtype, BLOCK_BYTES)

    def narrowed(self, width: int) -> ShrinkingArena:
        """The first ``width`` elements of every record under the number it had; this one is empty then.

        Blocks are given back as they are copied, so both together never take more than this one did.
        """
        other = ShrinkingArena(width, self.dtype)
        other._num_used = self._num_used
        other.release(self._free[: self._num_free])
        per_block = 1 << self.shift
        for first in range(0, self._num_used, per_block):
            numbers = np.arange(first, min(first + per_block, self._num_used))
            contents = self.read(numbers)[:, :width]
            self._chunks[first >> self.shift] = np.empty(0, dtype=np.uint8)
            other._grow(int(numbers[-1]) + 1)
            other.write(numbers, contents)
        return other

    def sort_free(self) -> None:
        """Hand out free numbers in ascending order from now on: chunks of a row then lie side by side."""
        with self._lock:
            self._free[: self._num_free] = np.sort(self._free[: self._num_free])[::-1]

    @property
    def numbering(self) -> tuple[int, Int64s]:
        """How many numbers were handed out, and which of them are free, the next to be used last."""
        return self._num_used, self._free[: self._num_free].copy()

    def resume(self, num_used: int, free: Int64s) -> None:
        """Continue an empty arena with the `numbering` of another."""
        self._grow(num_used)
        self._num_used = num_used
        self.release(free)


def entry_words(settings: PruneSettings) -> int:
    """Words of 4 bytes that an entry takes: slots, utilities and the step of these."""
    return settings.chunks + utility_words(settings) + 1


def utility_words(settings: PruneSettings) -> int:
    """Utilities of a row: one count of accesses, or a sum of norms for each chunk."""
    return 1 if settings.by_access else settings.chunks


def decay_powers(decay: float) -> npt.NDArray[np.float64]:
    """Powers 0 to 1,023 of a decay, and those of 1,024 times as much, by multiplying: the same anywhere."""
    powers = np.ones((2, 1024))
    for level, factor in enumerate((decay, float(np.multiply.accumulate(np.full(1024, decay))[-1]))):
        powers[level, 1:] = np.multiply.accumulate(np.full(1023, factor))
    return powers


def count_powers(decay: float) -> npt.NDArray[np.uint64]:
    """The same as fixed-point numbers with 32 bits behind the point."""
    return np.floor(decay_powers(decay) * 2.0**32).astype(np.uint64)


def decayed(powers: npt.NDArray[np.float64], steps: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``decay**steps``, the same bits anywhere."""
    taken: npt.NDArray[np.float64] = powers[0, steps & 1023] * powers[1, np.minimum(steps >> 10, 1023)]
    return taken


def decayed_counts(
    powers: npt.NDArray[np.uint64], counts: npt.NDArray[Any], steps: npt.NDArray[Any]
) -> npt.NDArray[np.uint32]:
    """Decay counts for some steps without an access; ``powers`` are those of `count_powers`."""
    shift = np.uint64(32)
    steps = np.maximum(steps, 0)
    low = (counts.astype(np.uint64) * powers[0, steps & 1023]) >> shift
    both: npt.NDArray[np.uint64] = (low * powers[1, np.minimum(steps >> 10, 1023)]) >> shift
    return both.astype(np.uint32)


def counts_of_sums(sums: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Counts for rows with floating-point utilities (rows x chunks): in proportion, one access on average.

    Checkpoints of versions that had no counts are read this way.
    """
    best = sums.max(axis=1, initial=0).astype(np.float64)
    mean = best.mean() if len(best) else 0.0
    if not mean > 0:
        return np.zeros((len(best), 1), np.uint32)
    counts: npt.NDArray[np.float64] = np.minimum(np.round(best / mean * ONE_ACCESS), MOST)
    return counts.astype(np.uint32)[:, None]


class Entries:
    """Entries by number."""

    def __init__(self, settings: PruneSettings, for_training: bool = True) -> None:
        self._settings, self.num_chunks, self.for_training = settings, settings.chunks, for_training
        self._counts = count_powers(settings.decay_of_step)
        self._powers = decay_powers(settings.decay_of_step)
        self.arena = ShrinkingArena(entry_words(settings) if for_training else self.num_chunks, np.int32)

    @property
    def _memory(self) -> tuple[Int64s, int, int]:
        return self.arena.addresses, self.arena.shift, self.arena.width

    def add(self, count: int, now: int) -> Int64s:
        """Numbers of new entries, without chunks."""
        numbers = self.arena.allocate(count)
        fresh = np.zeros((count, self.arena.width), np.int32)
        fresh[:, : self.num_chunks] = ABSENT
        if self.for_training:
            fresh[:, -1] = now
        self.arena.write(numbers, fresh)
        return numbers

    def slots(self, numbers: Int64s) -> tuple[Slots, Slots]:
        """The slots of entries, and how many are not empty."""
        slots = np.empty((len(numbers), self.num_chunks), np.int32)
        held = np.empty(len(numbers), np.int32)
        read_slots(*self._memory, numbers, slots, held)
        return slots, held

    def set_slots(self, numbers: Int64s, slots: Slots) -> None:
        """Replace the slots of entries."""
        words = self.arena.read(numbers)
        words[:, : self.num_chunks] = slots
        self.arena.write(numbers, words)

    def count(self, numbers: Int64s, accesses: npt.NDArray[Any], now: int) -> None:
        """Add accesses in step ``now``."""
        count_accesses(*self._memory, numbers, accesses, self._counts, now)

    def add_norms(
        self, numbers: Int64s, accesses: Int64s, starts: Int64s, gradients: npt.NDArray[Any], now: int
    ) -> None:
        """Add the norms of gradients (of stored values), times accesses, in step ``now``."""
        add_norms(*self._memory, numbers, accesses, starts, gradients, self._powers, now)

    def add_sums(self, numbers: Int64s, sums: npt.NDArray[np.float32], now: int) -> None:
        """Add utilities of chunks that others have summed up by step ``now``."""
        words = self.arena.read(numbers)
        words[:, self.num_chunks : -1] = (self._utilities(words, now) + sums).view(np.int32)
        words[:, -1] = now
        self.arena.write(numbers, words)

    def utilities(self, numbers: Int64s, now: int) -> npt.NDArray[Any]:
        """Utilities after step ``now``: rows x 1 counts (uint32), or rows x chunks sums (float32)."""
        return self._utilities(self.arena.read(numbers), now)

    def _utilities(self, words: npt.NDArray[np.int32], now: int) -> npt.NDArray[Any]:
        saved, touched = self._saved(words)
        steps = now - touched.astype(np.int64)[:, None]
        if self._settings.by_access:
            return decayed_counts(self._counts, saved, steps)
        return (decayed(self._powers, steps) * saved.astype(np.float64)).astype(np.float32)

    def saved(self, numbers: Int64s) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any], Slots]:
        """Which chunks there are, their utilities as they were last updated, and the step of that."""
        words = self.arena.read(numbers)
        utilities, touched = self._saved(words)
        by_chunk = np.repeat(utilities, self.num_chunks // utilities.shape[1], axis=1)
        return words[:, : self.num_chunks] >= 0, by_chunk, touched

    def _saved(self, words: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], Slots]:
        kind = np.uint32 if self._settings.by_access else np.float32
        if not self.for_training:
            return np.zeros((len(words), utility_words(self._settings)), kind), np.zeros(len(words), np.int32)
        saved = np.ascontiguousarray(words[:, self.num_chunks : -1]).view(kind)
        return saved, np.ascontiguousarray(words[:, -1])

    def load_utilities(self, numbers: Int64s, saved: npt.NDArray[Any], touched: npt.NDArray[Any]) -> None:
        """Set utilities as `saved` returned them, or as another kind of run did."""
        if not self.for_training:
            return
        if self._settings.by_access:
            saved = saved[:, :1] if saved.dtype == np.uint32 else counts_of_sums(saved)
        words = self.arena.read(numbers)
        kind = np.uint32 if self._settings.by_access else np.float32
        words[:, self.num_chunks : -1] = np.ascontiguousarray(saved, kind).view(np.int32)
        words[:, -1] = touched
        self.arena.write(numbers, words)

    def drop_utilities(self) -> None:
        """Keep only what reading needs."""
        self.for_training = False
        self.arena = self.arena.narrowed(self.num_chunks)
