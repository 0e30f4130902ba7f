"""The ids of a batch by row: what a sparse step adds together, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from rowhaul.device import step_kernels
from rowhaul.device.launch import grid_of

LONG = 32  # ids beyond which a segment is cut
PIECE = 512  # ids of a piece
_BLOCK = 1024


class Segments:
    """Ids sorted by record, stably; where each record's begin; and the pieces of those that have many."""

    def __init__(self, records: Tensor) -> None:
        count = len(records)
        device = records.device
        self.records, self.ids = torch.sort(records, stable=True)
        heads = torch.empty(count, dtype=torch.int32, device=device)
        step_kernels.mark_heads[grid_of(count, _BLOCK)](self.records, heads, count, BLOCK=_BLOCK)
        numbers = torch.cumsum(heads, 0, dtype=torch.int32)
        self.starts = torch.empty(count + 1, dtype=torch.int32, device=device)
        self.count = torch.empty(1, dtype=torch.int32, device=device)
        step_kernels.list_segments[grid_of(count, _BLOCK)](
            numbers, self.starts, self.count, count, BLOCK=_BLOCK
        )
        # How many are long is known on the card alone; here it is bounded.
        self.most_long = count // (LONG + 1)
        self.most_pieces = self.most_long + count // PIECE
        if not self.most_long:
            return
        self.long_segments = torch.empty(self.most_long, dtype=torch.int32, device=device)
        self.first_pieces = torch.empty(count, dtype=torch.int32, device=device)
        self.piece_segments = torch.empty(self.most_pieces, dtype=torch.int32, device=device)
        self.counters = torch.zeros(2, dtype=torch.int32, device=device)
        step_kernels.list_pieces[grid_of(count, _BLOCK)](
            self.starts, self.count, self.long_segments, self.first_pieces, self.piece_segments,
            self.counters, LONG=LONG, PIECE=PIECE, BLOCK=_BLOCK,
        )  # fmt: skip
