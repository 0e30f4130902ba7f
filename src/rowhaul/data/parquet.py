"""Parquet files as decoded blocks: checked up front, read a few thousand rows at a time.

A row group can be as large as a file, so it is streamed, page by page, and only the columns that the
schema names are touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul._id_kinds import UNRECORDED
from rowhaul.data.block import Block
from rowhaul.data.columns import (
    KeyKinds,
    Origin,
    check_columns,
    decode_dense,
    decode_ids,
    decode_times,
    dense_numbers,
)
from rowhaul.data.contents import ContentDigests, FileFacts, digest_of
from rowhaul.data.origins import Origins
from rowhaul.data.schema import Schema
from rowhaul.data.targets import NO_TARGETS, decode_targets
from rowhaul.errors import DataError

READ_ROWS = 16_384
READ_BUFFER_BYTES = 1 << 16  # per column: a column chunk is not loaded as a whole


@dataclass(frozen=True)
class RowGroup:
    """A run of rows that can be found without reading what comes before it."""

    file: int
    group: int
    first_row: int
    num_rows: int


class ParquetRows:
    """The rows of some Parquet files, addressed by row group.

    Opening reads every file's footer and nothing else: missing columns and wrong types are found
    before the first batch.
    """

    def __init__(self, files: Sequence[Path], schema: Schema, with_label: bool) -> None:
        self._files = files
        self._schema = schema
        self._with_label = with_label
        self._time = schema.time if with_label else None
        self._columns = schema.column_names(with_label) + ([self._time.name] if self._time else [])
        self._footers: list[Any] = []
        self.file_facts: list[FileFacts] = []
        self.contents = ContentDigests()
        self.row_groups: list[RowGroup] = []
        kinds: KeyKinds = {}
        origins = Origins()
        for number, path in enumerate(files):
            with naming(path), pq.ParquetFile(path) as opened:
                footer, arrow_schema = opened.metadata, opened.schema_arrow
                self.file_facts.append(FileFacts.of(path, footer))
            check_columns(arrow_schema, schema, with_label, path, kinds, origins.of(arrow_schema, path))
            self._footers.append(footer)
            self._add_row_groups(number, footer)
        self.key_kinds = {name: kind for name, (kind, _) in kinds.items()}
        self._check_tables()

    def read(self, row_group: RowGroup, skip: int = 0) -> Iterator[Block]:
        """The rows of a row group after the first ``skip``, in blocks; one read as a whole is compared."""
        path = self._files[row_group.file]
        first_row, last_row = row_group.first_row, row_group.first_row + row_group.num_rows
        digests: list[str] | None = [] if skip == 0 else None
        with naming(path):
            opened = pq.ParquetFile(
                path,
                metadata=self._footers[row_group.file],
                buffer_size=READ_BUFFER_BYTES,
                pre_buffer=False,  # would load the whole row group
                page_checksum_verification=True,
            )
        with opened:
            batches = opened.iter_batches(
                READ_ROWS, row_groups=[row_group.group], columns=self._columns, use_threads=False
            )
            while True:
                with naming(path):
                    rows = next(batches, None)
                if rows is None:
                    return
                first_row += rows.num_rows
                if skip < rows.num_rows:
                    block = self._decode(rows.slice(skip), Origin(path, first_row - rows.num_rows + skip))
                    if digests is not None:
                        numbers = (dense_numbers(rows.column(one.name))[0] for one in self._schema.dense)
                        digests.append(digest_of(block, numbers))
                        if first_row == last_row:
                            self.contents.check(row_group.file, row_group.group, digests, path)
                    yield block
                skip = max(0, skip - rows.num_rows)

    def _check_tables(self) -> None:
        for table, features in self._schema.tables.items():
            kinds = {name: self.key_kinds[name] for name in features if name in self.key_kinds}
            if len(set(kinds.values()) - {UNRECORDED}) > 1:
                raise DataError(
                    f"the features of table {table!r} hold ids of different types ({kinds}), so they would "
                    "share no row; write them with one type, or give them separate tables"
                )

    def _add_row_groups(self, file: int, footer: Any) -> None:
        first_row = 0
        for group in range(footer.num_row_groups):
            num_rows = footer.row_group(group).num_rows
            if num_rows:
                self.row_groups.append(RowGroup(file, group, first_row, num_rows))
            first_row += num_rows

    def _decode(self, rows: pa.RecordBatch, origin: Origin) -> Block:
        return Block(
            ids=tuple(decode_ids(rows.column(name)) for name in self._schema.stored_features),
            dense=decode_dense(rows, self._schema.dense, origin),
            targets=decode_targets(rows, self._schema, origin) if self._with_label else NO_TARGETS,
            times=decode_times(rows.column(self._time.name), self._time, origin) if self._time else None,
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what Arrow and the system say about a file into an error that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(_explain(path, error)) from error


def _explain(path: Path, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not path.exists():
        where = f"working directory: {Path.cwd()}"
        return f"{path}: no such file ({where}); it must stay where it is while it is read"
    if path.is_dir():
        return f"{path} is a folder; name the files in it"
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read it; run `chmod +r {path}`"
    if path.stat().st_size == 0:
        return f"{path}: the file is empty (0 bytes), not a Parquet file; write it again or leave it out"
    if path.suffix in (".gz", ".csv", ".tsv", ".txt", ".zip", ".dat"):
        return f"{path}: a raw log, not a Parquet file; turn it into Parquet with `rowhaul prepare`"
    return f"{path}: not a whole Parquet file, truncated or damaged ({reason}); write it again"
