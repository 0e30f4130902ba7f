"""Host memory that a card's kernels read and write themselves, and that is used again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rowhaul.device.lanes import Event, pinned, settle
from rowhaul.device.plan_kernels import HEADER as _HEADER

HEADER = _HEADER.value


class Buffer:
    """Memory that both a card and a thread use for a while."""

    def __init__(self) -> None:
        self.used: Event = None  # until when the card uses it
        self.taken: Future[Any] | None = None  # until when the host does


class LeavingRows(Buffer):
    """Room for records that leave the card, and have no place in host memory yet.

    Args:
        num_records: that may leave at once.
        width: elements of each.
        dtype: of these.
        device: the card.
    """

    def __init__(self, num_records: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.rows = pinned(num_records * width, dtype, device).view(num_records, width)
        self.slots = pinned(num_records, torch.int64, device)


class ListedRows(Buffer):
    """Rows that a batch lacks: how many, their records, keys and tables, where they are, which are new."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.reserve(1)

    def reserve(self, most: int) -> None:
        """Make room for so many rows."""
        self.most = most + most % 2  # columns begin with words of 16 bytes
        self.all = pinned(HEADER + 5 * self.most, torch.int64, self._device)

    def __len__(self) -> int:
        """Count the rows, once the card has listed them."""
        return int(self.all[0])

    def columns(self) -> Tensor:
        """Return records, keys, tables, locations and the places of new rows among them."""
        return self.all[HEADER:].view(5, -1)[:, : len(self)]


AnyBuffer = TypeVar("AnyBuffer", bound=Buffer)


class Ring(Generic[AnyBuffer]):
    """Several buffers in turn: one is filled while the one before is emptied."""

    def __init__(self, make: Callable[[], AnyBuffer], count: int) -> None:
        self._all: Sequence[AnyBuffer] = [make() for _ in range(count)]
        self._turns = cycle(self._all)

    def next(self) -> AnyBuffer:
        """Return the buffer whose turn it is, once nobody uses it any more."""
        one = next(self._turns)
        if one.taken is not None:
            one.taken.result()
        settle(one.used)
        one.taken = one.used = None
        return one
