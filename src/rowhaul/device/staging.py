"""Buffers that records pass through between a card and host memory."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.lanes import Event, pinned, settle


class Staging:
    """Room for some records on the card, and as much in host memory that the card can copy from and to."""

    def __init__(self, num_records: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.there = torch.empty((num_records, width), dtype=dtype, device=device)
        self.here = torch.empty((num_records, width), dtype=dtype, pin_memory=device.type == "cuda")
        self._list = pinned(num_records + 1, torch.int32, device)
        self.used: Event = None  # until when the card uses it
        self.taken: Future[None] | None = None  # until when the host does

    def rows(self, count: int) -> npt.NDArray[Any]:
        """Return the first rows in host memory."""
        rows: npt.NDArray[Any] = self.here[:count].numpy()
        return rows

    def list_there(self, which: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Send a list of some of its rows to the card; and how many they are."""
        count = len(which)
        self._list[0] = count
        self._list.numpy()[1 : count + 1] = which
        there = self._list[: count + 1].to(self.there.device, non_blocking=True)
        return there[1:], there[:1]


class StagingRing:
    """Several buffers in turn: one is filled while the one before is emptied."""

    def __init__(
        self, count: int, num_records: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._all = [Staging(num_records, width, dtype, device) for _ in range(count)]
        self._turns = cycle(self._all)

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the card."""
        return sum(one.there.nbytes for one in self._all)

    def next(self) -> Staging:
        """Return the buffer whose turn it is, once nobody uses it any more."""
        one = next(self._turns)
        if one.taken is not None:
            one.taken.result()
        settle(one.used)
        one.taken = one.used = None
        return one
