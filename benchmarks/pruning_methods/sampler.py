"""Looks at the memory of a pruned model after every step; a run that ever holds more than it may ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from rowhaul.errors import RowhaulError
from rowhaul.nn import Batch
from rowhaul.pruning.deciding.room import INDEX_BYTES
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.pruning.pool.tables import PrunedTables
from rowhaul.store.arena import RecordArena
from rowhaul.store.index import KeyIndex

_EVERY = 10  # steps between counting the chunks that a batch reads


class BudgetExceededError(RowhaulError):
    """More is held than a budget allows."""


@dataclass
class Sampler:
    """What a run held and did, and that it never held more than its budget; `look` after every step."""

    pruning: PrunedRows | None
    budget: int = 0  # bytes; 0: any number
    num_looks: int = 0
    peak_bytes: int = 0
    evicted: int = 0  # chunks
    allocated: int = 0  # chunks
    chunks_read: int = 0  # in the batches that were counted, each as often as it is read
    ids_read: int = 0  # of the same batches
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)

    def look(self, held_bytes: int, batch: Batch) -> None:
        """After a step on ``batch``."""
        self.num_looks += 1
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        if self.budget and held_bytes > self.budget:
            raise BudgetExceededError(f"{held_bytes:,} bytes are held, {self.budget:,} are allowed")
        if self.pruning is None:
            return
        for tables in self.pruning.tables:
            check_room(tables)
            self._count_moves(tables)
        if self.num_looks % _EVERY == 0:
            self._count_reads(self.pruning, batch)

    def _count_moves(self, tables: PrunedTables) -> None:
        used_before, pruned_at = self._seen.get(id(tables), (0, 0))
        evicted, chunks = 0, tables.map
        if chunks.latest is not None and chunks.pruned_at != pruned_at:
            evicted = len(chunks.latest.evicted)
        self.evicted += evicted
        self.allocated += chunks.num_held - used_before + evicted
        self._seen[id(tables)] = (chunks.num_held, chunks.pruned_at)

    def _count_reads(self, pruning: PrunedRows, batch: Batch) -> None:
        for group in pruning.groups:
            lookup = group.tables.read(group.locate(batch.ids)[0], counting=False)
            self.chunks_read += int(lookup.counts @ lookup.held)
            self.ids_read += len(lookup.inverse)


def check_room(tables: PrunedTables) -> None:
    """Refuse more chunks, entries or bytes than there is room for."""
    chunks, room, entries = tables.map, tables.map.room, tables.map.entries.arena
    assert tables.arena.num_records == chunks.num_held <= room.num_chunks, f"{chunks.num_held} chunks"
    assert chunks.num_entries <= room.num_entries, f"{chunks.num_entries} entries of {room.num_entries}"
    most = _whole_blocks(tables.arena, room.num_chunks)
    assert tables.arena.allocated_bytes <= most, f"{tables.arena.allocated_bytes:,} of {most:,} bytes"
    most += _whole_blocks(entries, room.num_entries) + KeyIndex(len(tables.tables)).allocated_bytes
    most += INDEX_BYTES * room.num_entries
    assert tables.allocated_bytes <= most, f"{tables.allocated_bytes:,} bytes are held, of {most:,}"


def _whole_blocks(arena: RecordArena, num_records: int) -> int:
    """Bytes of the blocks that so many records lie in."""
    num_blocks = -(-num_records // (1 << arena.shift))
    return num_blocks * (arena.record_bytes << arena.shift)
