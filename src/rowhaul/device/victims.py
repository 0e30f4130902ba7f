"""Which records of a cache give way: those used longest ago."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LISTED_SHARE = 1 / 32  # of all records: listing looks at all of them, so it is done for many batches at once
_NEVER = 2**31 - 1


class Victims:
    """Lists records by when they were last used, oldest first; those used again since are passed over.

    Args:
        last_used: by record, the number of the latest batch that uses it; 0: it holds no row.
    """

    def __init__(self, last_used: Tensor) -> None:
        self._last_used = last_used
        self.clear()

    def clear(self) -> None:
        """Forget the list."""
        self._records = self._uses = self._last_used[:0]
        self._here = np.empty(0, np.int64)  # the same records in host memory

    def take(self, count: int, oldest: int) -> tuple[Tensor, npt.NDArray[np.int64]] | None:
        """Return ``count`` records that no batch from ``oldest`` on uses, on the card and here.

        They count as free from then on. None if there are not as many.
        """
        taken: list[tuple[Tensor, Tensor]] = []
        here: list[npt.NDArray[np.int64]] = []
        while count:
            if not len(self._records) and not self._list(count, oldest):
                for records, uses in taken:  # as before
                    self._last_used[records] = uses
                return None
            some = self._records[: 2 * count]
            unused = torch.nonzero(self._last_used[some] == self._uses[: len(some)]).reshape(-1)[:count]
            places = unused.cpu().numpy()
            end = len(some) if len(places) < count else int(places[-1]) + 1
            here.append(self._here[places])
            taken.append((some[unused], self._uses[unused]))
            self._last_used[taken[-1][0]] = 0
            self._records, self._uses, self._here = self._records[end:], self._uses[end:], self._here[end:]
            count -= len(places)
        return torch.cat([records for records, _ in taken]), np.concatenate(here)

    def _list(self, count: int, oldest: int) -> bool:
        """List the records used longest ago; False if fewer than ``count`` can go."""
        can_go = (self._last_used > 0) & (self._last_used < oldest)
        uses = torch.where(can_go, self._last_used, _NEVER)
        most = min(len(uses), max(8 * count, int(_LISTED_SHARE * len(uses))))
        self._uses, self._records = torch.topk(uses, most, largest=False, sorted=True)
        listed = int((self._uses < _NEVER).sum())
        self._uses, self._records = self._uses[:listed], self._records[:listed]
        self._here = self._records.cpu().numpy()
        return listed >= count
