"""Data to score that lacks columns of the training data: they read as missing, if a user says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rowhaul.data.files import expand_files
from rowhaul.data.parquet import naming
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError


class FilledStream(SampleStream):
    """Samples of files without some columns: those ids are missing, those numbers 0, as nulls are."""

    def __init__(self, files: Any, schema: Schema, batch_size: int, require_label: bool = False) -> None:
        self.absent = absent_columns(files, schema)
        self._whole = schema
        ids = tuple(column for column in schema.stored_ids if column.name not in self.absent)
        dense = tuple(column for column in schema.dense if column.name not in self.absent)
        if not ids:
            raise DataError(f"the data has none of the id columns {', '.join(schema.features)}")
        super().__init__(
            files, replace(schema, ids=ids, dense=dense), batch_size, require_label=require_label
        )

    def __iter__(self) -> Iterator[Samples]:
        return map(self._filled, super().__iter__())

    def _filled(self, samples: Samples) -> Samples:
        features, here = self._whole.features, {name: at for at, name in enumerate(samples.features)}
        lengths = np.zeros((len(features), len(samples)), samples.lengths.dtype)
        for at, name in enumerate(features):
            if name in here:
                lengths[at] = samples.lengths[here[name]]
        dense = np.zeros((len(samples), len(self._whole.dense)), samples.dense.dtype)
        kept = [at for at, column in enumerate(self._whole.dense) if column.name not in self.absent]
        dense[:, kept] = samples.dense
        # Ids are in the order of features, of which some have none now.
        return replace(samples, features=features, lengths=lengths, dense=dense)


def absent_columns(files: Any, schema: Schema) -> Sequence[str]:
    """Columns of the schema, besides the label, that some of the files lack."""
    found = []
    for path in expand_files(files):
        with naming(path):
            found.append(set(pq.read_schema(path).names))
    return [name for name in schema.column_names(with_label=False) if not all(name in one for one in found)]
