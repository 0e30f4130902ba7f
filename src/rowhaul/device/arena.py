"""Records on a card, in chunks: growing copies nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.device import copy_kernels
from rowhaul.device.launch import columns_of, grid_of, rows_together

CHUNK_BYTES = 16 << 20


class DeviceArena:
    """Values and optimizer state of records, by number; each has chunks of ``2**shift``.

    Args:
        dim: values of a record.
        state_width: numbers of its state; may be 0.
        dtype: of both.
        device: where they are.
        shift: by default, as makes chunks of 16 MiB.
    """

    def __init__(
        self,
        dim: int,
        state_width: int,
        dtype: torch.dtype,
        device: torch.device,
        shift: int | None = None,
    ) -> None:
        self.dim, self.state_width, self.device = dim, state_width, device
        self.torch_dtype, self.dtype = dtype, np.dtype(str(dtype).removeprefix("torch."))
        self.width = dim + state_width
        self.record_bytes = self.width * dtype.itemsize
        self.shift = shift_of(self.record_bytes) if shift is None else shift
        self._values: list[Tensor] = []
        self._states: list[Tensor] = []
        self.value_chunks = self.state_chunks = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Records there is memory for."""
        return len(self._values) << self.shift

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(one.nbytes for one in (*self._values, *self._states))

    def reserve(self, count: int) -> None:
        """Allocate memory for so many records in all."""
        size, before = 1 << self.shift, len(self._values)
        while self.capacity < count:
            self._values.append(torch.empty((size, self.dim), dtype=self.torch_dtype, device=self.device))
            self._states.append(
                torch.empty((size, self.state_width), dtype=self.torch_dtype, device=self.device)
            )
        if len(self._values) > before:
            self.value_chunks = self._distances(self._values)
            self.state_chunks = self._distances(self._states)

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As kernels take it: distances of chunks of values, and the first one; the same of state."""
        return self.value_chunks, self._values[0], self.state_chunks, self._states[0]

    def _distances(self, chunks: list[Tensor]) -> Tensor:
        """Elements from the first chunk to each; allocations are aligned to far more than one."""
        first = chunks[0].data_ptr()
        distances = [(one.data_ptr() - first) // self.dtype.itemsize for one in chunks]
        return torch.tensor(distances, dtype=torch.int64).to(self.device)

    def read(self, records: Tensor, out: Tensor | None = None) -> Tensor:
        """Values, then state, of records, a row each."""
        if out is None:
            out = torch.empty((len(records), self.width), dtype=self.torch_dtype, device=self.device)
        self._copy(copy_kernels.read_records, records, out)
        return out

    def write(self, records: Tensor, contents: Tensor) -> None:
        """Set records to rows of values and state."""
        self._copy(copy_kernels.write_records, records, contents.contiguous())

    def _copy(self, kernel: Any, records: Tensor, rows: Tensor) -> None:
        block = rows_together(self.dim)
        kernel[grid_of(len(records), block)](
            records, *self.memory, rows, len(records),
            DIM=self.dim, COLUMNS=columns_of(self.dim), STATE=self.state_width,
            STATE_COLUMNS=columns_of(self.state_width), SHIFT=self.shift, BLOCK=block,
        )  # fmt: skip


def shift_of(record_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the power of two of the records in a chunk."""
    return max(4, (chunk_bytes // record_bytes).bit_length() - 1)
