"""The data of `rowhaul simulate`: ids from Parquet files, and how many rows they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowhaul.cli.checks import feature_names
from rowhaul.cli.progress import counting_bar
from rowhaul.data.files import find_schema, schemas_beside
from rowhaul.data.schema import IdColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.schedule import IdBatch
from rowhaul.simulate.trace import RowCounter

COUNTED_SAMPLES = 1 << 16  # in one piece of the first pass


@dataclass(frozen=True)
class IdFiles:
    """The id columns of some Parquet files."""

    files: Sequence[str]
    schema: Schema  # ids alone: no label, no dense columns

    @classmethod
    def find(cls, files: Sequence[str], schema: Path | None, features: str | None) -> IdFiles:
        """The files and the id columns that their schema names, or those of the comma-separated ``features``.

        A feature has the table that the schema gives it, if there is one.
        """
        if features is None:
            return cls(files, _ids_alone(find_schema(files, schema, require_label=False).ids))
        names = feature_names(features)
        described = schema is not None or schemas_beside(files)
        known = find_schema(files, schema, require_label=False).ids if described else ()
        columns = {column.name: column for column in known}
        return cls(files, _ids_alone(tuple(columns.get(name, IdColumn(name)) for name in names)))

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables; a row is a (position in this tuple, key) pair."""
        return tuple(self.schema.tables)

    @property
    def table_of_feature(self) -> list[int]:
        """The number of the table of each feature."""
        return [self.tables.index(column.table) for column in self.schema.ids]

    def num_batches(self, batch_size: int) -> int:
        """How many batches the files hold, the last one possibly short."""
        return SampleStream(self.files, self.schema, batch_size, require_label=False).num_batches

    def batches(self, batch_size: int, iterations: int) -> Iterator[IdBatch]:
        """The first ``iterations`` batches."""
        limit = iterations * batch_size
        table_of_feature = self.table_of_feature
        for samples in SampleStream(self.files, self.schema, batch_size, limit=limit, require_label=False):
            yield IdBatch.from_features(table_of_feature, samples.values, samples.lengths)

    def count_rows(self) -> RowCounter:
        """Count the distinct rows of all files, under a progress bar."""
        counter = RowCounter(len(self.tables))
        stream = SampleStream(self.files, self.schema, COUNTED_SAMPLES, require_label=False)
        with counting_bar() as bar:
            task = bar.add_task("counting rows", total=stream.num_samples, note="")
            for samples in stream:
                for table, keys in zip(self.table_of_feature, samples.ids_of_features(), strict=True):
                    counter.add(table, keys)
                bar.update(task, completed=stream.position)
        return counter


def _ids_alone(columns: tuple[IdColumn, ...]) -> Schema:
    return Schema(label=None, dense=(), ids=columns)
