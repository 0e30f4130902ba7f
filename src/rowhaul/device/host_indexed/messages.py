"""Bytes between host memory and a card."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]


def moved(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a card without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pinned_buffer(num_bytes: int, device: torch.device) -> Bytes:
    """Host memory that a card can write to, where there is one."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()


class Uploads:
    """Brings received messages to a card, once for the tables of all row sizes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[Bytes, Tensor] | None = None

    def of(self, given: Bytes) -> Tensor:
        """A message on the card."""
        last = self._last  # another thread may replace it
        if last is None or last[0] is not given:
            last = self._last = given, torch.from_numpy(given).to(self._device, non_blocking=True)
        return last[1]

    def forget(self) -> None:
        """Free the last one."""
        self._last = None
