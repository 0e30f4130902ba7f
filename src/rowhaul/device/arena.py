"""Records on a card, in chunks: growing copies nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20


class DeviceArena:
    """Values and optimizer state of records, by number; each has chunks of ``2**shift``.

    Args:
        dim: values of a record.
        state_width: numbers of its state; may be 0.
        dtype: of both.
        device: where they are.
    """

    def __init__(self, dim: int, state_width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dim, self.state_width, self.device = dim, state_width, device
        self.torch_dtype, self.dtype = dtype, np.dtype(str(dtype).removeprefix("torch."))
        self.width = dim + state_width
        self.record_bytes = self.width * dtype.itemsize
        self.shift = max(4, (CHUNK_BYTES // self.record_bytes).bit_length() - 1)
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

    def read(self, records: Tensor) -> Tensor:
        """Values, then state, of records, a row each."""
        out = torch.empty(
            (len(records), self.dim + self.state_width), dtype=self.torch_dtype, device=self.device
        )
        for number, here, places in self._by_chunk(records):
            out[here, : self.dim] = self._values[number][places]
            out[here, self.dim :] = self._states[number][places]
        return out

    def write(self, records: Tensor, contents: Tensor) -> None:
        """Set records to rows of values and state."""
        for number, here, places in self._by_chunk(records):
            self._values[number][places] = contents[here, : self.dim]
            self._states[number][places] = contents[here, self.dim :]

    def _by_chunk(self, records: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        chunks = records >> self.shift
        found = []
        for number in torch.unique(chunks).tolist():
            here = torch.nonzero(chunks == number).reshape(-1)
            found.append((number, here, records[here] & ((1 << self.shift) - 1)))
        return found
