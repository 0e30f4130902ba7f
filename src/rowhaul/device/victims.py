"""Which rows of a cache give way: those used longest ago."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rowhaul.device.index import DeviceIndex
from rowhaul.device.lanes import Listener
from rowhaul.device.launch import grid_of
from rowhaul.device.victim_kernels import list_old, take_listed

_LISTED_SHARE = 1 / 32  # of all records: listing looks at all of them, so it is done for many batches at once
_LISTED_TURNS = 8  # or so many times what is needed now
_GOLDEN = 0.618034
_SAMPLE = 1 << 16  # records that tell how long ago most were used
_SPARE = 1 / 16  # more are taken than needed: some of the list were used since
_NEVER = 2**31 - 1
_BLOCK = 1024


class Victims:
    """Lists places of the index by when their rows were last used; rows used again since are passed over.

    Args:
        index: of the card.
        last_used: by record, the number of the latest batch that uses it; 0: it holds no row.
        listener: brings numbers from the card.
    """

    def __init__(self, index: DeviceIndex, last_used: Tensor, listener: Listener) -> None:
        self._index, self._last_used, self._listener = index, last_used, listener
        self._counter = torch.zeros(1, dtype=torch.int64, device=index.device)
        self._stride = int(_GOLDEN * index.capacity) | 1  # between places that follow in a list
        while math.gcd(self._stride, index.capacity) > 1:
            self._stride += 2
        self.clear()

    def clear(self) -> None:
        """Forget the list; do so when places move."""
        self._listed = self._counter[:0]
        self._latest = self._last_used[:1]  # of the rows listed

    def take(self, count: int, oldest: int) -> Tensor:
        """Take rows that no batch from ``oldest`` on uses out of the index; returns their records.

        These are ``count`` or a few more, or all that there are.
        """
        taken, num_taken = [self._counter[:0]], 0
        while num_taken < count:
            if not len(self._listed) and not self._list(count - num_taken, oldest):
                break
            wanted = count - num_taken
            some = self._listed[: wanted + int(_SPARE * wanted)]
            self._listed = self._listed[len(some) :]
            records = torch.empty_like(some)
            self._counter.zero_()
            take_listed[grid_of(len(some), _BLOCK)](
                some, len(some), self._index.places, self._last_used, self._latest, records, self._counter,
                BLOCK=_BLOCK,
            )  # fmt: skip
            found = int(self._listener.hear(self._counter)[0])
            taken.append(records[:found])
            num_taken += found
        return torch.cat(taken) if len(taken) > 2 else taken[-1]

    def _list(self, count: int, oldest: int) -> bool:
        """List rows used longest ago; return whether there are any."""
        num_records = len(self._last_used)
        wanted = min(num_records, max(_LISTED_TURNS * count, int(_LISTED_SHARE * num_records)))
        some = self._last_used[:: max(1, num_records // _SAMPLE)]
        uses = torch.where((some > 0) & (some < oldest), some, _NEVER).sort().values
        at = min(wanted * len(uses) // num_records, len(uses) - 1)
        # A batch, and all of those before, whose rows are about as many.
        most = min(num_records, 2 * wanted)
        if self._list_until(uses[at : at + 1].clamp(max=oldest - 1), most) < count:
            return self._list_until(uses.new_full((1,), oldest - 1), most) > 0
        return True

    def _list_until(self, latest: Tensor, most: int) -> int:
        listed = torch.empty(most, dtype=torch.int64, device=self._counter.device)
        self._counter.zero_()
        places, capacity = self._index.places, self._index.capacity
        list_old[grid_of(capacity, _BLOCK)](
            places, capacity, self._stride, self._last_used, latest, listed, self._counter, most, BLOCK=_BLOCK
        )
        num_listed = min(int(self._listener.hear(self._counter)[0]), most)
        self._listed, self._latest = listed[:num_listed], latest
        return num_listed
