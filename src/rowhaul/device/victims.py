"""Which records of a cache give way: those used longest ago."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.lanes import Listener

_LISTED_SHARE = 1 / 32  # of all records: listing looks at all of them, so it is done for many batches at once
_NEVER = 2**31 - 1
Int64s = npt.NDArray[np.int64]


class Victims:
    """Lists records by when they were last used, oldest first; those used again since are passed over.

    Args:
        last_used: by record, the number of the latest batch that uses it; 0: it holds no row.
        listener: brings numbers from the card.
    """

    def __init__(self, last_used: Tensor, listener: Listener) -> None:
        self._last_used, self._listener = last_used, listener
        self.clear()

    def clear(self) -> None:
        """Forget the list."""
        self._listed = self._last_used[:0].to(torch.int64)
        self._records = np.empty(0, np.int64)  # the same in host memory
        self._uses = np.empty(0, np.int32)  # when they were used, by then

    def take(self, count: int, oldest: int) -> Int64s | None:
        """Return ``count`` records that no batch from ``oldest`` on uses; None if there are not as many.

        The caller marks them as free.
        """
        taken = [np.empty(0, np.int64)]
        while count:
            if not len(self._records) and not self._list(count, oldest, taken):
                return None
            some = slice(0, 2 * count)
            now = self._listener.hear(self._last_used[self._listed[some]])
            places = np.flatnonzero(now == self._uses[some])[:count]
            end = len(now) if len(places) < count else int(places[-1]) + 1
            taken.append(self._records[places])
            self._listed, self._records, self._uses = (
                self._listed[end:],
                self._records[end:],
                self._uses[end:],
            )
            count -= len(places)
        return np.concatenate(taken)

    def _list(self, count: int, oldest: int, taken: list[Int64s]) -> bool:
        """List the records used longest ago that are not taken; False if fewer than ``count`` can go."""
        can_go = (self._last_used > 0) & (self._last_used < oldest)
        for records in taken:
            can_go[torch.from_numpy(records).to(can_go.device)] = False
        uses = torch.where(can_go, self._last_used, _NEVER)
        most = min(len(uses), max(8 * count, int(_LISTED_SHARE * len(uses))))
        found, listed = torch.topk(uses, most, largest=False, sorted=True)
        self._uses = self._listener.hear(found)
        self._uses = self._uses[self._uses < _NEVER].copy()
        self._listed = listed[: len(self._uses)]
        self._records = self._listener.hear(self._listed).copy()
        return len(self._records) >= count
