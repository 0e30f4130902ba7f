"""`CardArena`: records whose numbers are handed out here and whose contents are on a card."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.arena import DeviceArena
from rowhaul.device.host_indexed import move_kernels
from rowhaul.device.host_indexed.messages import Uploads, moved
from rowhaul.device.launch import columns_of, grid_of, rows_together
from rowhaul.store.arena import OutOfMemoryError, RecordArena, Records


class CardArena(RecordArena):
    """Records of ``dim`` values and ``state_width`` numbers of state.

    There are no addresses: kernels of a CPU cannot read these records.

    Args:
        dim: values of a record.
        state_width: numbers of its state; may be 0.
        dtype: of both.
        device: the card.
        uploads: brings messages there.
    """

    def __init__(
        self, dim: int, state_width: int, dtype: torch.dtype, device: torch.device, uploads: Uploads
    ) -> None:
        self.card = DeviceArena(dim, state_width, dtype, device)
        super().__init__(self.card.width, self.card.dtype)
        self._uploads = uploads
        self.card.reserve(1)  # kernels read some record where there is nothing to read

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks, on the card."""
        return self.card.allocated_bytes

    def read(self, records: Records) -> npt.NDArray[Any]:
        """A copy of records in host memory, one a row."""
        out = np.empty(len(records) * self.record_bytes, np.uint8)
        self.copy_out(records, np.full(len(records), self.record_bytes), self._back_to_back(records), out)
        return out.view(self.dtype).reshape(len(records), self.width)

    def write(self, records: Records, contents: npt.NDArray[Any]) -> None:
        """Overwrite records with the rows of ``contents``."""
        given = np.ascontiguousarray(contents, dtype=self.dtype).reshape(-1).view(np.uint8)
        self.copy_in(records, np.full(len(records), self.record_bytes), self._back_to_back(records), given)

    def rows(self, records: Records) -> Tensor:
        """A copy of records on the card, one a row."""
        return self.card.read(self._there(records))

    def put(self, records: Records, contents: Tensor) -> None:
        """Overwrite records with rows that are on the card."""
        self.card.write(self._there(records), contents)

    def copy_out(
        self, records: Records, lengths: Records, offsets: Records, out: npt.NDArray[np.uint8]
    ) -> None:
        """Copy the first bytes of each record to its offset in ``out``; pinned memory gets them later."""
        target = torch.from_numpy(out).view(self.card.torch_dtype)
        if self.card.device.type == "cpu" or target.is_pinned():
            self._move(move_kernels.gather, records, lengths, offsets, target)
        else:
            there = torch.empty_like(target, device=self.card.device)
            self._move(move_kernels.gather, records, lengths, offsets, there)
            target.copy_(there)

    def copy_in(
        self, records: Records, lengths: Records, offsets: Records, given: npt.NDArray[np.uint8]
    ) -> None:
        """Overwrite the first bytes of each record with those at its offset in ``given``."""
        source = self._uploads.of(given).view(self.card.torch_dtype)
        self._move(move_kernels.scatter, records, lengths, offsets, source)

    def _move(
        self, kernel: Any, records: Records, lengths: Records, offsets: Records, buffer: Tensor
    ) -> None:
        """Copy between records and a buffer; lengths and offsets are in bytes, whole elements of them."""
        card = self.card
        if not len(records):
            return
        block = rows_together(card.width)
        value_bytes = card.dim * self.dtype.itemsize
        kernel[grid_of(len(records), block)](
            self._there(records),
            moved((lengths > value_bytes).astype(np.int32), card.device),
            moved(offsets // self.dtype.itemsize, card.device),
            *card.memory, buffer, len(records),
            DIM=card.dim, COLUMNS=columns_of(card.dim), STATE=card.state_width,
            STATE_COLUMNS=columns_of(card.state_width), SHIFT=card.shift, BLOCK=block,
        )  # fmt: skip

    def _there(self, records: Records) -> Tensor:
        return moved(records.astype(np.int32), self.card.device)

    def _back_to_back(self, records: Records) -> Records:
        return np.arange(len(records)) * self.record_bytes

    def _grow(self, num_records: int) -> None:
        try:
            self.card.reserve(num_records)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"no memory on the card for {num_records:,} rows of {self.record_bytes} bytes "
                f"({self.num_records:,} are held); use a smaller cache (--cache)"
            ) from None
