"""Looks at the memory of a pruned model after every step; a run that ever holds more than it may ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from rowhaul.nn import Batch
from rowhaul.pruning.pool import Pruner
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.pruning.room import INDEX_BYTES
from rowhaul.store.arena import RecordArena
from rowhaul.store.index import KeyIndex

_EVERY = 10  # steps between counting the chunks that a batch reads


@dataclass
class Sampler:
    """What a run held and did; `look` after every step."""

    pruning: PrunedRows | None
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
        if self.pruning is None:
            return
        for pruner in self.pruning.pruners:
            check_room(pruner)
            self._count_moves(pruner)
        budget = self.pruning.settings.budget
        assert not budget or held_bytes <= budget, f"{held_bytes:,} bytes are held, {budget:,} are allowed"
        if self.num_looks % _EVERY == 0:
            self._count_reads(self.pruning, batch)

    def _count_moves(self, pruner: Pruner) -> None:
        used_before, pruned_at = self._seen.get(id(pruner), (0, 0))
        evicted = 0
        if pruner.latest is not None and pruner.pruned_at != pruned_at:
            evicted = len(pruner.latest.evict)
        self.evicted += evicted
        self.allocated += pruner.pool.num_used - used_before + evicted
        self._seen[id(pruner)] = (pruner.pool.num_used, pruner.pruned_at)

    def _count_reads(self, pruning: PrunedRows, batch: Batch) -> None:
        for group in pruning.groups:
            located = group.locate(batch.ids)[0]
            lookup = group.pruned.read(located)
            counts = located.counts()
            self.chunks_read += int(counts @ (lookup.chunks >= 0).sum(axis=1))
            self.ids_read += int(counts.sum())


def check_room(pruner: Pruner) -> None:
    """Refuse more chunks, entries or bytes than there is room for."""
    pool, room = pruner.pool, pruner.room
    assert pool.num_used <= pool.capacity <= room.num_chunks, f"{pool.num_used} chunks of {room.num_chunks}"
    assert pruner.num_entries <= room.num_entries, f"{pruner.num_entries} entries of {room.num_entries}"
    most = _whole_blocks(pool.arena, pool.capacity)
    assert pool.arena.allocated_bytes <= most, f"{pool.arena.allocated_bytes:,} of {most:,} bytes of chunks"
    entries = sum(group.arena.allocated_bytes for group in pruner.groups)
    index = sum(group.index.allocated_bytes for group in pruner.groups)
    for group in pruner.groups:
        most += _whole_blocks(group.arena, room.num_entries) + KeyIndex(len(group.tables)).allocated_bytes
    most += INDEX_BYTES * room.num_entries
    held = pool.arena.allocated_bytes + entries + index
    assert held <= most, f"{held:,} bytes are held, there is room for {most:,}"


def _whole_blocks(arena: RecordArena, num_records: int) -> int:
    """Bytes of the blocks that so many records lie in."""
    num_blocks = -(-num_records // (1 << arena.shift))
    return num_blocks * (arena.record_bytes << arena.shift)
