"""`DeviceIndex`: from (table, key) to the number of a record, on a card; it grows by itself."""

from __future__ import annotations

import secrets
from collections import deque

import torch
from torch import Tensor

from rowhaul.device import index_kernels as kernels
from rowhaul.device.launch import grid_of, limited
from rowhaul.errors import RowhaulError

CAPACITY, RECORD_BITS = kernels.CAPACITY.value, kernels.RECORD_BITS.value
NEXT_RECORD, NUM_FREE = kernels.NEXT_RECORD.value, kernels.NUM_FREE.value
NUM_NEW, NUM_MISSING = kernels.NUM_NEW.value, kernels.NUM_MISSING.value
NUM_REUSED, NUM_REMOVED = kernels.NUM_REUSED.value, kernels.NUM_REMOVED.value
NUM_LISTED = kernels.NUM_LISTED.value

# Ids a program of one warp: a search goes on until the last of them is found.
BLOCK = 64
_LIST_BLOCK = 1024
_FULL = 0.65  # the share of places that may be used: beyond, searches get long
_ROOMY = 0.5  # the share that is used after growing
_FULL_FIXED = 0.88  # the same where memory does not grow
_SPARE_RECORDS = 1.25  # numbers of records there is room for after growing, for each that is used
_LEAST = 1024  # places
_PLACE_BYTES = 4
NAME_BYTES = 10  # of a record: its key and its table
_MOST_BYTES = 24  # a key, however much room a batch may need
_MOST_RECORDS = 2**31 - 1
MOST_TABLES = 2**15 - 1


class DeviceIndex:
    """Numbers of records by (table, key); any 64-bit key.

    How many keys there are is known on the card; the host learns it a little later, and until then goes by an
    upper bound, so that a step waits for nothing.

    Args:
        device: the card.
        num_places: at first.
        num_records: numbers there is room for at first.
    """

    def __init__(
        self, device: torch.device, num_places: int = _LEAST, num_records: int = int(_LEAST * _FULL)
    ) -> None:
        self.device = device
        facts = [num_places, secrets.randbits(63), *[0] * (kernels.NUM_FACTS - 2)]
        self._facts = torch.tensor(facts, dtype=torch.int64).to(device)
        self._keys = torch.zeros(0, dtype=torch.int64, device=device)  # by record, like the next
        self._tables = torch.zeros(0, dtype=torch.int16, device=device)
        self._places = torch.zeros(0, dtype=torch.int32, device=device)
        self._free = torch.zeros(1, dtype=torch.int32, device=device)
        self._resize(num_places, num_records)
        self.num_growths = 0
        self._num_removed = 0  # places that are neither empty nor used, or were and are used again
        self._known = 0  # keys, and records ever numbered, when last heard of
        self._unheard: deque[tuple[torch.cuda.Event | None, Tensor, int]] = deque()

    def __len__(self) -> int:
        """Count the keys; waits for the card."""
        return int((self._tables >= 0).sum())

    def num_keys(self, table: int) -> int:
        """Count the keys of a table; waits for the card."""
        return int((self._tables == table).sum())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of places, names and lists."""
        return sum(one.nbytes for one in (self._places, self._keys, self._tables, self._free))

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels take it: places, keys and tables of records, and numbers that kernels share."""
        return self._places, self._keys, self._tables, self._facts

    @property
    def num_records(self) -> int:
        """Numbers ever handed out; waits for the card."""
        return int(self._facts[NEXT_RECORD])

    @property
    def most_records(self) -> int:
        """An upper bound of the numbers handed out so far, without waiting."""
        self._hear()
        return self._known + sum(count for _, _, count in self._unheard)

    def find(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Numbers of the records of keys, -1 where there is none."""
        records = torch.empty(len(keys), dtype=torch.int32, device=self.device)
        kernels.find[grid_of(len(keys), BLOCK)](
            keys, tables, *self.memory, records, len(keys), BLOCK=BLOCK, num_warps=1
        )
        return records

    def add_missing(self, keys: Tensor, tables: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
        """Number the keys whose record is -1, which may repeat; `reserve` first.

        Fills in ``records``. Returns an id of each new key, whose record is to be written, and how many
        there are.
        """
        missing = self.list_missing(records)
        new = self.number_listed(keys, tables, missing, records)
        return new, self._facts[NUM_NEW : NUM_NEW + 1]

    def list_missing(self, records: Tensor) -> Tensor:
        """List the ids whose record is -1; `facts` says how many there are."""
        missing = torch.empty(len(records), dtype=torch.int32, device=self.device)
        self._facts[NUM_NEW : NUM_MISSING + 1].zero_()
        kernels.list_missing[grid_of(len(records), _LIST_BLOCK)](
            records, missing, self._facts, len(records), BLOCK=_LIST_BLOCK
        )
        return missing

    def number_listed(self, keys: Tensor, tables: Tensor, missing: Tensor, records: Tensor) -> Tensor:
        """Number the keys of listed ids; returns an id of each: `facts` says how many."""
        new = torch.empty_like(missing)
        claimed = torch.empty(len(missing), dtype=torch.int64, device=self.device)
        grid = limited(grid_of(len(missing), BLOCK))
        options = {"BLOCK": BLOCK, "num_warps": 1}
        kernels.claim[grid](keys, tables, self._places, self._facts, missing, claimed, **options)
        batch = keys, tables, *self.memory
        kernels.settle[grid](*batch, self._free, missing, claimed, records, new, **options)
        kernels.find_listed[grid](*batch, missing, records, **options)
        return new

    @property
    def facts(self) -> Tensor:
        """Numbers on the card that kernels share: see `index_kernels`."""
        return self._facts

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more keys surely fit."""
        needed = self.most_records + count
        return needed <= len(self._keys) and needed + self._num_removed <= _FULL * self._num_places

    def spare_for(self, count: int, most_bytes: int) -> bool:
        """Make room for ``count`` more keys if that takes little: then nobody needs to know how many are new.

        Little is what stays below 24 bytes a key, or ``most_bytes``.
        """
        if self.has_room(count):
            return True
        self._wait()
        needed = (self._known + count) * (_PLACE_BYTES / _FULL + NAME_BYTES)
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
            needed = self._known + count
            num_places = max(self._known / _ROOMY, needed / _FULL, _LEAST)
            self._resize(int(num_places) + 1, max(int(_SPARE_RECORDS * self._known), needed))
            self.num_growths += 1
            self._num_removed = 0
            self._facts[NUM_REUSED].zero_()

    def remove(self, keys: Tensor, tables: Tensor) -> Tensor:
        """Remove keys, all different; returns the records they had, for others from now on."""
        records = torch.empty(len(keys), dtype=torch.int32, device=self.device)
        kernels.remove[grid_of(len(keys), BLOCK)](keys, tables, *self.memory, records, len(keys), BLOCK=BLOCK)
        freed = records[records >= 0]
        num_free = max(int(self._facts[NUM_FREE]), 0)
        self._free = torch.cat([self._free[:num_free], freed, self._free.new_zeros(1)])
        self._facts[NUM_FREE] = num_free + len(freed)
        self.num_growths += 1  # the list of free records is another
        self._num_removed += len(freed)
        return freed

    # Where there are never more than so many records: places stay as they are, and the caller counts.

    def list_free(self, count: int) -> None:
        """List the records that lost their keys, ``count`` of them, before others get them."""
        self._free = torch.zeros(max(count, 1), dtype=torch.int32, device=self.device)
        self._facts[NUM_FREE].zero_()
        kernels.list_free[grid_of(len(self._tables), _LIST_BLOCK)](
            self._tables, self._free, self._facts, BLOCK=_LIST_BLOCK
        )

    def forget_free(self) -> None:
        """Free the memory of that list."""
        self._free = self._free[:1].clone()

    def sweep_for(self, num_keys: int, count: int, num_removed: int) -> None:
        """Empty the places of removed keys, if ``count`` more beside ``num_keys`` need that.

        ``num_removed`` is what `facts` says: places of removed keys less those used again.
        """
        if num_removed and num_keys + num_removed + count > _FULL_FIXED * self._num_places:
            self._places.fill_(-1)
            self._place_all()
            self._facts[NUM_REUSED : NUM_REMOVED + 1].zero_()

    def clear(self) -> None:
        """Forget every key."""
        self._places.fill_(-1)
        self._tables.fill_(-1)
        self._facts[NEXT_RECORD:].zero_()
        self._known = self._num_removed = 0
        self._unheard.clear()

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tables, keys and records of everything, by table and key."""
        records = torch.nonzero(self._tables >= 0).reshape(-1)
        tables, keys = self._tables[records], self._keys[records]
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(tables[order], stable=True)]
        return tables[order], keys[order], records[order]

    def _resize(self, num_places: int, num_records: int) -> None:
        """Get room for so many records, and other places."""
        more = max(num_records - len(self._keys), 0)
        self._keys = torch.cat([self._keys, self._keys.new_zeros(more)])
        self._tables = torch.cat([self._tables, self._tables.new_full((more,), -1)])
        del self._places  # before there are others: names tell where keys belong
        self._num_places = num_places
        # Behind them are some that nobody claims.
        self._places = torch.full((num_places + BLOCK,), -1, dtype=torch.int32, device=self.device)
        self._facts[CAPACITY] = num_places
        self._facts[RECORD_BITS] = (len(self._keys) - 1).bit_length()
        self._place_all()

    def _place_all(self) -> None:
        kernels.place_all[grid_of(len(self._keys), BLOCK)](*self.memory, len(self._keys), BLOCK=BLOCK)

    def ask(self, count: int) -> None:
        """Ask the card how many records there are, after `add_missing` of ``count`` ids."""
        if self.device.type != "cuda":
            self._known = self.num_records
            return
        heard = torch.empty(1, dtype=torch.int64, pin_memory=True)
        heard.copy_(self._facts[NEXT_RECORD : NEXT_RECORD + 1], non_blocking=True)
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
