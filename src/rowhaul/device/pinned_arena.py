"""Records in host memory that a card reads and writes by address, without copies on the way."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowhaul._quantities import bytes_text
from rowhaul.errors import RowhaulError
from rowhaul.store.arena import RecordArena


class PinnedArena(RecordArena):
    """An arena whose memory is pinned, so that kernels of a card reach it; elsewhere it is any other arena.

    Args:
        width: elements of a record.
        dtype: of its elements.
        device: the card.
    """

    def __init__(self, width: int, dtype: npt.DTypeLike, device: torch.device) -> None:
        super().__init__(width, dtype)
        self._device = device

    def new(self) -> PinnedArena:
        """Return an arena of the same kind without records."""
        return PinnedArena(self.width, self.dtype, self._device)

    def _new_slab(self, num_bytes: int, *, huge_pages: bool) -> npt.NDArray[np.uint8]:
        slab = super()._new_slab(num_bytes, huge_pages=huge_pages)
        if self._device.type == "cuda":
            _pin(slab, self._device)
        return slab


def _pin(slab: npt.NDArray[np.uint8], device: torch.device) -> None:
    """Pin memory until nothing refers to it any more."""
    address, runtime = slab.ctypes.data, torch.cuda.cudart()
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(address, slab.nbytes, 0)
    if int(error):
        raise RowhaulError(
            f"the card cannot reach {bytes_text(slab.nbytes)} more of host memory ({error}); leave out "
            "device_memory, or allow this process to lock more memory"
        )
    # Chunks are views of what the slab is a view of.
    weakref.finalize(slab.base, _unpin, runtime, address, device).atexit = False


def _unpin(runtime: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still read it
    runtime.cudaHostUnregister(address)
