"""Parquet files as decoded blocks: checked up front, read a few thousand rows at a time.

A row group can be as large as a file, so it is streamed, page by page, and only the columns that the
schema names are touched. Several readers may have a share of the columns each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul._id_kinds import UNRECORDED
from rowhaul.data.block import Block, rechunk
from rowhaul.data.column_shares import ColumnShare, DecodedColumns, all_columns, join_columns
from rowhaul.data.columns import (
    KeyKinds,
    Origin,
    check_columns,
    decode_ids,
    decode_times,
    raw_dense,
    transform_dense,
)
from rowhaul.data.contents import ContentDigests, FileFacts, column_digests
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


class OtherReader(Protocol):
    """A reader of other columns of the same files."""

    share: ColumnShare

    def read_columns(self, place: int, skip: int, num_blocks: int) -> Iterator[DecodedColumns]:
        """Start reading the blocks of a row group, as `ParquetRows.read_columns`; the call does not wait."""

    def stop(self) -> None:
        """Stop yielding blocks; any thread may call this."""

    def close(self) -> None:
        """End reading; in the thread that reads."""


@dataclass(frozen=True)
class Sharing:
    """How columns are shared while a stream is iterated."""

    own: ColumnShare
    others: tuple[OtherReader, ...]


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
        targets = [*(one.name for one in schema.tasks), schema.weight, schema.group]
        targets += [self._time.name] if self._time else []
        self._targets = [name for name in targets if name] if with_label else []
        self._alone = Sharing(all_columns(schema), ())
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

    def read(self, place: int, skip: int = 0, sharing: Sharing | None = None) -> Iterator[Block]:
        """The rows of a row group after the first ``skip``, in blocks; one read as a whole is compared."""
        sharing, group = sharing or self._alone, self.row_groups[place]
        shares = [sharing.own, *(one.share for one in sharing.others)]
        # The others begin at once, and decode while this process does.
        num_blocks = -(-group.num_rows // READ_ROWS) - skip // READ_ROWS
        parts = [one.read_columns(place, skip, num_blocks) for one in sharing.others]
        own = self.read_columns(sharing.own, place, skip)
        digests: list[dict[str, int]] = []
        num_read = skip
        for decoded in zip(own, *parts, strict=True):
            block = join_columns(shares, [one.block for one in decoded])
            num_read += len(block)
            if not skip:
                digests.append({name: value for one in decoded for name, value in one.digests})
                if num_read == group.num_rows:
                    self.contents.check(group.file, group.group, digests, self._files[group.file])
            yield block

    def read_columns(self, share: ColumnShare, place: int, skip: int = 0) -> Iterator[DecodedColumns]:
        """Some columns of the same rows, in the same blocks, with digests if the row group is read whole.

        Blocks begin at multiples of `READ_ROWS`, whatever the columns are.
        """
        group = self.row_groups[place]
        dense = [self._schema.dense[number] for number in share.dense]
        features = [self._schema.stored_features[number] for number in share.features]
        raw = self._read_raw(share, features, group, skip)
        for block in rechunk(raw, READ_ROWS, first=READ_ROWS - skip % READ_ROWS):
            digests = () if skip else column_digests(block, features, [one.name for one in dense])
            transform_dense(block.dense, dense)
            yield DecodedColumns(block, digests)

    def column_costs(self) -> dict[str, int]:
        """What decoding takes, roughly, by column: each value counts as much as four bytes."""
        costs = dict.fromkeys(self._columns, 0)
        for group in self.row_groups[:: 1 + len(self.row_groups) // 32]:  # some will do
            described = self._footers[group.file].row_group(group.group)
            for number in range(described.num_columns):
                column = described.column(number)
                name = column.path_in_schema.split(".")[0]
                if name in costs:
                    costs[name] += 4 * column.num_values + column.total_uncompressed_size
        return costs

    def _read_raw(
        self, share: ColumnShare, features: Sequence[str], group: RowGroup, skip: int
    ) -> Iterator[Block]:
        """Read a share of the columns, dense ones as they are stored, in whatever blocks come."""
        path, row = self._files[group.file], group.first_row
        columns = [*features, *(self._schema.dense[number].name for number in share.dense)]
        columns += self._targets if share.targets else ()
        with naming(path):
            opened = pq.ParquetFile(
                path,
                metadata=self._footers[group.file],
                buffer_size=READ_BUFFER_BYTES,
                pre_buffer=False,  # would load the whole row group
                page_checksum_verification=True,
            )
        with opened:
            batches = opened.iter_batches(
                READ_ROWS,
                row_groups=[group.group],
                columns=list(dict.fromkeys(columns)),  # a group may be an id, too
                use_threads=False,
            )
            while True:
                with naming(path):
                    rows = next(batches, None)
                if rows is None:
                    return
                if skip < rows.num_rows:
                    yield self._decode(rows.slice(skip), share, features, Origin(path, row + skip))
                row += rows.num_rows
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

    def _decode(
        self, rows: pa.RecordBatch, share: ColumnShare, features: Sequence[str], origin: Origin
    ) -> Block:
        targets = share.targets and self._with_label
        time = self._time if share.targets else None
        return Block(
            ids=tuple(decode_ids(rows.column(name)) for name in features),
            dense=raw_dense(rows, [self._schema.dense[number] for number in share.dense], origin),
            targets=decode_targets(rows, self._schema, origin) if targets else NO_TARGETS,
            times=decode_times(rows.column(time.name), time, origin) if time else None,
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
