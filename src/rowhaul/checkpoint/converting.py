"""A checkpoint with its rows in another type: the same keys, dense weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint.location import Place
from rowhaul.checkpoint.progress import Counter, Progress
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.writer import CheckpointWriter
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.store.packing import PLAIN, RowNames, check_row_dtype, packing_of
from rowhaul.store.row_format import row_format
from rowhaul.store.row_parts import Arrays
from rowhaul.store.tables import table_seeds
from rowhaul.store.whole_rows import WholeRows


def convert(
    reader: CheckpointReader,
    to: str | Place,
    row_dtype: str,
    *,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> CheckpointReader:
    """Write a checkpoint whose values are held in ``row_dtype``; returns it.

    Values are rounded by seed, table and key, as initial values are. What only the cluster that saved could
    use is left out.

    Args:
        reader: the checkpoint.
        to: the new one.
        row_dtype: float32, bfloat16, float16 or int8.
        seed: of the run.
        facts: instead of the checkpoint's.
        progress: called with the rows written and all there are.

    Raises:
        ConfigError: an unknown type, or one that does not go with these rows.
        CheckpointError: rows of a format that cannot be converted, a value too large for the type, or a
            damaged file; nothing is written.
    """
    check_row_dtype(row_dtype)
    format = row_format("whole" if row_dtype == PLAIN else row_dtype)
    assert isinstance(format, WholeRows)
    for table in reader.tables.values():
        if not reader.format(table.name).keyed_by_id:
            raise CheckpointError(
                f"{reader.path} has rows that have a budget: how many there are follows from the bytes of "
                "each, so they stay in the type that they were trained in"
            )
        if not reader.format(table.name).row_dtype:
            raise CheckpointError(
                f"{reader.path} has {table.format} rows, whose parts come and go one by one: they stay in "
                f"{table.dtype}; only whole rows can be converted"
            )
        if row_dtype != PLAIN and table.dtype != "float32":
            raise ConfigError(
                f"{reader.path} was trained in {table.dtype}, and rows in {row_dtype} are trained in "
                "float32; train with precision float32"
            )
        packing_of(row_dtype, table.dim, table.state_width, table.dtype)  # or raises
    count = Counter(sum(one.num_rows for one in reader.tables.values()), progress)
    given = reader.facts if facts is None else facts
    with CheckpointWriter(to) as writer:
        writer.facts = {name: fact for name, fact in given.items() if name != "cluster"}
        for group in reader.groups:
            writer.tensors(group, reader.tensors(group))
        for table in reader.tables.values():
            blocks = count.over(_converted(reader, table.name, row_dtype, format, seed))
            writer.blocks(table.name, blocks, table.dim, table.state_width, table.dtype, format.name)
    return CheckpointReader(to)


def _converted(
    reader: CheckpointReader, name: str, row_dtype: str, format: WholeRows, seed: int
) -> Iterator[Arrays]:
    table = reader.tables[name]
    packing = packing_of(row_dtype, table.dim, table.state_width, table.dtype)
    seeds = table_seeds([name], seed)
    for keys, records in reader.rows(name):
        if packing is not None:
            rows = RowNames(np.zeros(len(keys), np.int64), keys)
            packed = packing.pack(records, rows, 0, seeds)
            _check_held(reader, name, row_dtype, keys, records, packing.readable(packed))
            records = packed
        yield format.encode(keys, records, table.dim)


def _check_held(
    reader: CheckpointReader,
    name: str,
    row_dtype: str,
    keys: npt.NDArray[np.int64],
    before: npt.NDArray[Any],
    after: npt.NDArray[Any],
) -> None:
    """Refuse numbers that have become infinite."""
    lost = np.argwhere(np.isfinite(before) & ~np.isfinite(after))
    if len(lost):
        row, column = lost[0]
        why = ", which is beyond 65,504: use bfloat16" if row_dtype == "float16" else ": use float32"
        raise CheckpointError(
            f"{reader.path}: table {name!r}: {row_dtype} cannot hold the value {before[row, column]} of key "
            f"{keys[row]}{why}"
        )
