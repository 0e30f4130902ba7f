"""`DeviceIndex`: from (table, key) to the number of a record, on a card; it grows by itself."""

from __future__ import annotations

import secrets
from collections import deque

import torch
from torch import Tensor

from rowhaul.device import index_kernels as kernels
from rowhaul.device.launch import grid_of, limited
from rowhaul.errors import RowhaulError

# Ids a program of one warp: a search goes on until the last of them is found.
BLOCK = 64
_LIST_BLOCK = 1024
_FULL = 0.8  # the share of places that may be used: beyond, searches get long
_ROOMY = 0.68  # the share that is used after growing: at 16 bytes a place, 23.5 a key
_LEAST = 1024
_MOST_BYTES = 24  # a key, however much room a batch may need
_PLACE_BYTES = 16
_MOST_RECORDS = 2**31 - 1
RECORD_MASK = (1 << 40) - 1
NUM_REUSED, NUM_REMOVED = kernels.NUM_REUSED.value, kernels.NUM_REMOVED.value
_SLICE = 1 << 20  # places moved at a time where memory must not grow


class DeviceIndex:
    """Numbers of records by (table, key); any 64-bit key.

    How many keys there are is known on the card; the host learns it a little later, and until then goes by an
    upper bound, so that a step waits for nothing.

    Args:
        device: the card.
        capacity: places at first.
        num_records: if there are never more: kernels of the caller list those that are free.
    """

    def __init__(self, device: torch.device, capacity: int = _LEAST, num_records: int = 0) -> None:
        self.device = device
        self._capacity = capacity
        self._places = self._empty_places(capacity)
        facts = [capacity, secrets.randbits(63), *[0] * (kernels.NUM_FACTS - 2)]
        self._facts = torch.tensor(facts, dtype=torch.int64).to(device)
        self._free = torch.zeros(
            max(num_records, 1), dtype=torch.int32 if num_records else torch.int64, device=device
        )
        self.num_growths = 0
        self._num_removed = 0  # places that are neither empty nor used, or were and are used again
        self._known = 0  # keys, and records ever numbered, when last heard of
        self._unheard: deque[tuple[torch.cuda.Event | None, Tensor, int]] = deque()

    def __len__(self) -> int:
        """Count the keys; waits for the card."""
        return int((self._words() >= 0).sum())

    def num_keys(self, table: int) -> int:
        """Count the keys of a table; waits for the card."""
        return int((self._words() >> 40 == table).sum())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of places and lists."""
        return self._places.nbytes + self._free.nbytes

    @property
    def num_records(self) -> int:
        """Numbers ever handed out; waits for the card."""
        return int(self._facts[2])

    @property
    def most_records(self) -> int:
        """An upper bound of the numbers handed out so far, without waiting."""
        self._hear()
        return self._known + sum(count for _, _, count in self._unheard)

    def find(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Numbers of the records of keys, -1 where there is none."""
        records = torch.empty(len(keys), dtype=torch.int32, device=self.device)
        kernels.find[grid_of(len(keys), BLOCK)](
            keys, tables, self._places, self._facts, records, len(keys), BLOCK=BLOCK, num_warps=1
        )
        return records

    def add_missing(self, keys: Tensor, tables: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
        """Number the keys whose record is -1, which may repeat; `reserve` first.

        Fills in ``records``. Returns an id of each new key, whose record is to be written, and how many
        there are.
        """
        missing = self.list_missing(records)
        return self.number_listed(keys, tables, missing, records), self._facts[4:5]

    def list_missing(self, records: Tensor) -> Tensor:
        """List the ids whose record is -1; `facts` says how many there are."""
        missing = torch.empty(len(records), dtype=torch.int32, device=self.device)
        self._facts[4:6].zero_()
        kernels.list_missing[grid_of(len(records), _LIST_BLOCK)](
            records, missing, self._facts, len(records), BLOCK=_LIST_BLOCK
        )
        return missing

    def number_listed(self, keys: Tensor, tables: Tensor, missing: Tensor, records: Tensor) -> Tensor:
        """Number the keys of listed ids; returns an id of each: `facts` says how many."""
        new = torch.empty_like(missing)
        claimed = torch.empty(len(missing), dtype=torch.int64, device=self.device)
        grid = limited(grid_of(len(missing), BLOCK))
        batch = keys, tables, self._places, self._facts
        options = {"BLOCK": BLOCK, "num_warps": 1}
        kernels.claim[grid](*batch, missing, claimed, **options)
        kernels.settle[grid](*batch, self._free, missing, claimed, records, new, **options)
        kernels.find_listed[grid](*batch, missing, records, **options)
        return new

    @property
    def facts(self) -> Tensor:
        """Numbers on the card that kernels share: see `index_kernels`."""
        return self._facts

    @property
    def places(self) -> Tensor:
        """Where keys are, in pairs of words: see `index_kernels`."""
        return self._places

    @property
    def capacity(self) -> int:
        """Places that keys may have."""
        return self._capacity

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more keys surely fit."""
        return self.most_records + self._num_removed + count <= _FULL * self._capacity

    def spare_for(self, count: int, most_bytes: int) -> bool:
        """Make room for ``count`` more keys if that takes little: then nobody needs to know how many are new.

        Little is what stays below 24 bytes a key, or ``most_bytes``.
        """
        if self.has_room(count):
            return True
        self._wait()
        needed = (self._known + count) / _FULL * _PLACE_BYTES
        if needed > max(_MOST_BYTES * self._known, most_bytes):
            return False
        self.reserve(count)
        return True

    def _wait(self) -> None:
        """Learn how many records there are."""
        self._known = self.num_records
        self._unheard.clear()

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more keys; waits for the card where it must."""
        if self.has_room(count):
            return
        self._wait()
        if self._known + count > _MOST_RECORDS:
            raise RowhaulError(
                f"{self._known + count:,} rows of one size are more than a card's index numbers "
                f"({_MOST_RECORDS:,}); spread them over more workers"
            )
        if not self.has_room(count):
            self._grow(int(max(self._known / _ROOMY, (self._known + count) / _FULL)) + 1)

    def remove(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Remove keys, all different; returns the records they had, for others from now on."""
        records = self._drop(keys, tables)
        freed = records[records >= 0]
        num_free = max(int(self._facts[3]), 0)
        self._free = torch.cat([self._free[:num_free], freed, self._free.new_zeros(1)])
        self._facts[3] = num_free + len(freed)
        self.num_growths += 1  # the list of free records is another
        self._num_removed += len(freed)
        return freed

    def _drop(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Empty the places of keys, and return the records they had."""
        records = torch.empty(len(keys), dtype=torch.int64, device=self.device)
        kernels.remove[grid_of(len(keys), BLOCK)](
            keys, tables, self._places, self._facts, records, len(keys), BLOCK=BLOCK
        )
        return records

    # Where there are never more than so many records: memory stays as it is, and the caller counts.

    @property
    def free(self) -> Tensor:
        """Records without a key, as many as `facts` says."""
        return self._free

    def sweep_for(self, num_keys: int, count: int, num_removed: int) -> bool:
        """Empty the places of removed keys, if ``count`` more beside ``num_keys`` need that: keys move.

        ``num_removed`` is what `facts` says: places of removed keys less those used again.
        """
        if num_keys + num_removed + count <= _FULL * self._capacity or not num_removed:
            return False
        self._sweep(num_keys)
        return True

    def _put(self, entries: Tensor) -> None:
        kernels.move_places[grid_of(len(entries), BLOCK)](
            entries, len(entries), self._places, self._facts, BLOCK=BLOCK
        )

    def _sweep(self, num_keys: int) -> None:
        """Take all keys out, through host memory, and put them in again."""
        held = torch.empty((num_keys, 2), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        count = 0
        for first in range(0, self._capacity, _SLICE):
            some = self._places[first : min(first + _SLICE, self._capacity)]
            some = some[some[:, 1] >= 0]
            held[count : count + len(some)].copy_(some)
            count += len(some)
        self._places.fill_(-1)
        for first in range(0, count, _SLICE):
            self._put(held[first : min(first + _SLICE, count)].to(self.device))
        self._facts[NUM_REUSED : NUM_REMOVED + 1].zero_()

    def clear(self) -> None:
        """Forget every key."""
        self._places.fill_(-1)
        self._facts[2:].zero_()
        self._known = self._num_removed = 0
        self._unheard.clear()

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tables, keys and records of everything, by table and key."""
        used = self._words() >= 0
        words, keys = self._words()[used], self._places[: self._capacity, 0][used]
        tables, records = words >> 40, words & RECORD_MASK
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(tables[order], stable=True)]
        return tables[order], keys[order], records[order]

    def _words(self) -> Tensor:
        """What places hold beside their keys, place by place."""
        return self._places[: self._capacity, 1]

    def _grow(self, capacity: int) -> None:
        old, num_old = self._places, self._capacity
        self.num_growths += 1
        self._capacity = max(_LEAST, capacity)
        self._places = self._empty_places(self._capacity)
        self._facts[0] = self._capacity
        kernels.move_places[grid_of(num_old, BLOCK)](old, num_old, self._places, self._facts, BLOCK=BLOCK)
        self._num_removed = 0
        self._facts[NUM_REUSED : NUM_REUSED + 1].zero_()

    def _empty_places(self, capacity: int) -> Tensor:
        """Places without keys, and some behind them that nobody claims."""
        return torch.full((capacity + BLOCK, 2), -1, dtype=torch.int64, device=self.device)

    def ask(self, count: int) -> None:
        """Ask the card how many records there are, after `add_missing` of ``count`` ids."""
        if self.device.type != "cuda":
            self._known = self.num_records
            return
        heard = torch.empty(1, dtype=torch.int64, pin_memory=True)
        heard.copy_(self._facts[2:3], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._unheard.append((event, heard, count))

    def _hear(self) -> None:
        """Take the answers that have arrived."""
        while self._unheard:
            event, heard, _ = self._unheard[0]
            if event is None or not event.query():
                return
            self._unheard.popleft()
            self._known = int(heard[0])
