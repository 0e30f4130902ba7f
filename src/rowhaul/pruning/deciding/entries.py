"""Entries of tracked rows: which chunks they hold, and how useful they have been."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import add_norms, count_accesses, read_slots
from rowhaul.pruning.deciding.utilities import (
    count_powers,
    counts_of_sums,
    decay_powers,
    decayed,
    decayed_counts,
)
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
