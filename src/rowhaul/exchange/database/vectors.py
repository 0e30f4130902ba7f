"""The payloads of pulls and pushes: every rank's part of the vectors in one buffer, table by table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.exchange.database.routing import Asked, Route, TableRoute
from rowhaul.exchange.transport import Bytes
from rowhaul.store.database.leases import Lease
from rowhaul.store.database.pooled import Vectors, read_vectors, row_gradients
from rowhaul.store.database.rows import Rows
from rowhaul.store.database.stepping import Gradients

Floats = npt.NDArray[Any]


def num_asked(asked: Asked) -> int:
    """Vectors that come from one rank for one table: rows, or sums of bags."""
    return len(asked.rows) if asked.bags is None else len(asked.bags)


class Payload:
    """A message of vectors of several tables, in the tables' order."""

    def __init__(self, rows: Rows, counts: Mapping[str, int], data: Bytes | None = None) -> None:
        dtype = np.dtype(rows.settings.dtype)
        tables = [
            (spec.name, counts[spec.name], spec.dim) for spec in rows.settings.tables if spec.name in counts
        ]
        self.num_bytes = sum(count * dim for _, count, dim in tables) * dtype.itemsize
        self._tables, self._dtype, self._data = tables, dtype, data

    def parts(self) -> tuple[Bytes, dict[str, Floats]]:
        """The whole, and the vectors of each table in it."""
        data = np.empty(self.num_bytes, np.uint8) if self._data is None else self._data
        parts, begin = {}, 0
        values = data.view(self._dtype)
        for name, count, dim in self._tables:
            parts[name] = values[begin : begin + count * dim].reshape(count, dim)
            begin += count * dim
        return data, parts


def asked_counts(route: Route, rank: int) -> dict[str, int]:
    """Vectors of each table that come from a rank, and gradients that go there."""
    return {table.part.table: num_asked(table.asked[rank]) for table in route.tables}


def served_counts(route: Route, rank: int) -> dict[str, int]:
    """Vectors of each table that go to a rank, and gradients that come from there."""
    return {table: vectors.num_vectors for table, vectors in route.served[rank].items()}


def answer_pull(rows: Rows, route: Route, rank: int) -> Bytes:
    """What a rank is to get: rows as they are, sums of bags."""
    data, parts = Payload(rows, served_counts(route, rank)).parts()
    for table, vectors in route.served[rank].items():
        rows.read(rows.places[table].group, vectors, parts[table])
    return data


def assemble(rows: Rows, table: TableRoute, parts: Sequence[Floats], out: Floats) -> None:
    """All vectors of a table from what every rank sent: rows pooled here, then sums in rank order."""
    vectors = table.vectors
    if vectors.is_plain:
        for asked, values in zip(table.asked, parts, strict=True):
            out[asked.rows] = values
        return
    arena = rows.groups[rows.places[table.part.table].group].arena
    distinct = np.zeros((len(vectors.locations), out.shape[1]), out.dtype)
    for asked, values in zip(table.asked, parts, strict=True):
        if asked.bags is None:
            distinct[asked.rows] = values
    # As rows that are stored nowhere; the mean waits for the sums.
    places = -1 - np.arange(len(distinct))
    read_vectors(arena, replace(vectors, locations=places, spare=distinct, is_mean=False), out, rows.pieces)
    for asked, values in zip(table.asked, parts, strict=True):
        if asked.bags is not None:
            out[asked.bags] += values  # every bag once
    if vectors.is_mean:
        out /= _bag_sizes(vectors, out.dtype)


def scatter_gradients(rows: Rows, route: Route, gradients: Mapping[str, Floats]) -> list[Bytes]:
    """Gradients for every rank: summed here for each row, or one for each bag that is pooled there."""
    payloads = [Payload(rows, asked_counts(route, rank)).parts() for rank in range(len(route.served))]
    for table in route.tables:
        name, vectors = table.part.table, table.vectors
        given = gradients[name]
        if any(asked.bags is None and len(asked.rows) for asked in table.asked):
            summed = row_gradients(vectors, given)
        if vectors.is_mean:
            given = given / _bag_sizes(vectors, given.dtype)
        for rank, asked in enumerate(table.asked):
            if asked.bags is not None:
                np.take(given, asked.bags, axis=0, out=payloads[rank][1][name])
            elif len(asked.rows):
                np.take(summed, asked.rows, axis=0, out=payloads[rank][1][name])
    return [data for data, _ in payloads]


def gradients_from(rows: Rows, route: Route, rank: int, data: Bytes, lease: Lease) -> list[Gradients]:
    """The gradients of records that one rank's push brought."""
    _, parts = Payload(rows, served_counts(route, rank), data).parts()
    return [
        Gradients(
            lease, rows.places[table].group, table, vectors.locations, row_gradients(vectors, parts[table])
        )
        for table, vectors in route.served[rank].items()
    ]


def _bag_sizes(vectors: Vectors, dtype: npt.DTypeLike) -> Floats:
    assert vectors.offsets is not None
    return np.maximum(np.diff(vectors.offsets), 1).astype(dtype).reshape(-1, 1)
