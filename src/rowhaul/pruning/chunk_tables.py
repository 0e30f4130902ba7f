"""Chunks as rows of their own: how pruned rows are spread over a cluster.

Chunk ``k`` of a row of table ``t`` is a row of *chunk table* ``t * num_chunks + k`` under the same key:
found, moved, cached and stepped like any row. It begins with the values that the whole row would have there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.pruning.chunk_kernels import write_initial_chunks
from rowhaul.pruning.deciding.chunk_map import row_seeds
from rowhaul.store.index import Int64s
from rowhaul.store.tables import TableGroup, TableSpec


class ChunkTables(TableGroup):
    """Chunk tables of one chunk size.

    Args:
        tables: of chunks.
        optimizer: of rows; to it a chunk is a row.
        dtype: of values and state.
        seed: as of whole rows.
        row_tables: the table of whole rows that each belongs to.
        columns: of a row that each one's chunks have.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        row_tables: Sequence[str],
        columns: npt.NDArray[np.int64],  # tables x values of a chunk
    ) -> None:
        super().__init__(tables, optimizer, dtype, seed)
        self._seeds = row_seeds(row_tables, seed)
        self._columns = np.ascontiguousarray(columns)

    def _write_initial(
        self, memory: RecordMemory, records: Int64s, keys: Int64s, starts: Int64s, which: Int64s
    ) -> None:
        state = np.array([self.optimizer.initial_state], dtype=self.dtype)
        tables = np.searchsorted(starts, which, side="right") - 1
        write_initial_chunks(
            memory.addresses, memory.shift, memory.width, records, tables, keys[which], np.zeros_like(which),
            np.array([0, self.dim]), self._columns, self._seeds, self._lows, self._steps,
            np.array([self.optimizer.state_width(self.dim)]), state,
        )  # fmt: skip
