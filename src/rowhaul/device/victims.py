"""Which rows of a cache give way: those used longest ago."""

from __future__ import annotations

import torch
from torch import Tensor

from rowhaul.device.index import NUM_LISTED
from rowhaul.device.launch import grid_of
from rowhaul.device.victim_kernels import list_old

_LISTED_SHARE = 1 / 32  # of all records: listing looks at all of them, so it is done for many batches at once
_LISTED_TURNS = 8  # or so many times what is needed now
MOST_LISTED = 1 / 8  # of all records: the list takes memory, too
_SAMPLE = 1 << 16  # records that tell how long ago most were used
_SPARE = 1 / 16  # more are taken than needed: some of the list were used since
_NEVER = 2**31 - 1
_BLOCK = 1024


class Victims:
    """Lists records by when their rows were last used, on the card; waits for nothing.

    How many are listed is known on the card, and here once `heard` is told; rows may be used again later.

    Args:
        facts: numbers that the index shares with kernels.
        last_used: by record, the number of the latest batch that uses it; 0: it holds no row.
    """

    def __init__(self, facts: Tensor, last_used: Tensor) -> None:
        self._facts, self._last_used = facts, last_used
        self.clear()

    def clear(self) -> None:
        """Forget the list."""
        self.listed = torch.zeros(0, dtype=torch.int32, device=self._last_used.device)
        self.latest = self._last_used[:1]  # batch that used one of the rows listed
        self._first = self._end = 0  # of those not taken yet

    def heard(self, num_listed: int) -> None:
        """Note how many the card has listed."""
        self._end = min(self._end, num_listed)

    @property
    def has_more(self) -> bool:
        """Whether some of the list may be left."""
        return self._first < self._end

    def list(self, count: int, oldest: int, *, everything: bool) -> None:
        """List rows used longest ago, many times ``count``; or ``everything`` that may go.

        These are rows that no batch from ``oldest`` on uses.
        """
        num_records = len(self._last_used)
        wanted = max(_LISTED_TURNS * count, int(_LISTED_SHARE * num_records))
        wanted = max(min(wanted, int(MOST_LISTED * num_records) // 2), 1)
        most = 2 * wanted
        if everything:
            self.latest = self._last_used.new_full((1,), oldest - 1)
        else:
            # A batch such that rows used by it and those before are about as many.
            some = self._last_used[:: max(1, num_records // _SAMPLE)]
            uses = torch.where((some > 0) & (some < oldest), some, _NEVER).sort().values
            at = min(wanted * len(uses) // num_records, len(uses) - 1)
            self.latest = uses[at : at + 1].clamp(max=oldest - 1)
        self.listed = torch.zeros(most, dtype=torch.int32, device=self._last_used.device)
        self._facts[NUM_LISTED].zero_()
        list_old[grid_of(num_records, _BLOCK)](
            self._last_used, num_records, self.latest, self.listed, self._facts, most, BLOCK=_BLOCK
        )
        self._first, self._end = 0, most

    def take(self, count: int, most: int) -> tuple[int, int]:
        """Take about ``count`` of the list, and at most ``most``: from a place of it on, so many."""
        first, wanted = self._first, min(count + int(_SPARE * count), most)
        self._first = min(first + wanted, self._end)
        return first, self._first - first
