"""Chunks as rows of their own: how pruned rows are spread over a cluster.

Chunk ``k`` of a row of table ``t`` is a row of *chunk table* ``t * num_chunks + k`` under the same key:
found, moved, cached and stepped like any row. It begins with the values that the whole row would have there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.pruning.chunk_kernels import write_initial_part
from rowhaul.store.index import Int64s
from rowhaul.store.tables import TableGroup, TableSpec


def row_seeds(names: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """What the rows of tables are drawn from, as `TableGroup` has it."""
    return np.array(
        [xxhash.xxh64_intdigest(name.encode(), seed=seed & (2**64 - 1)) for name in names], np.uint64
    )


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
        write_initial_part(
            memory.addresses, memory.shift, memory.width, records, keys, starts, which,
            self._seeds, self._lows, self._steps, self._columns, self.dim, state,
        )  # fmt: skip
