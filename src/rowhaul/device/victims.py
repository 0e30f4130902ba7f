"""Which records of a cache give way: those used longest ago."""

from __future__ import annotations

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

    def take(self, count: int, oldest: int) -> Tensor | None:
        """Return ``count`` records that no batch from ``oldest`` on uses; None if there are not as many.

        They count as free from then on.
        """
        taken: list[tuple[Tensor, Tensor]] = []
        while count:
            if not len(self._records) and not self._list(count, oldest):
                for records, uses in taken:  # as before
                    self._last_used[records] = uses
                return None
            some = self._records[: 2 * count]
            unused = torch.nonzero(self._last_used[some] == self._uses[: len(some)]).reshape(-1)[:count]
            end = len(some) if len(unused) < count else int(unused[-1]) + 1
            taken.append((some[unused], self._uses[unused]))
            self._last_used[taken[-1][0]] = 0
            self._records, self._uses = self._records[end:], self._uses[end:]
            count -= len(unused)
        return torch.cat([records for records, _ in taken])

    def _list(self, count: int, oldest: int) -> bool:
        """List the records used longest ago; False if fewer than ``count`` can go."""
        can_go = (self._last_used > 0) & (self._last_used < oldest)
        uses = torch.where(can_go, self._last_used, _NEVER)
        most = min(len(uses), max(8 * count, int(_LISTED_SHARE * len(uses))))
        self._uses, self._records = torch.topk(uses, most, largest=False, sorted=True)
        listed = int((self._uses < _NEVER).sum())
        self._uses, self._records = self._uses[:listed], self._records[:listed]
        return listed >= count
