"""A request's vectors from what every rank sent, and their gradients for what every rank is to get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.routes import GroupRoute
from rowhaul.database.distributed.routing_kernels import add_gradients
from rowhaul.database.requests import Request, TableKeys
from rowhaul.database.rows import Rows
from rowhaul.errors import DataError
from rowhaul.store.pooling import pool_rows

Floats = npt.NDArray[Any]
Tables = Mapping[str, Floats]  # vectors x dim


def fill_tables(rows: Rows, group: int, route: GroupRoute, arrived: Floats, out: Tables) -> None:
    """Write the vectors of every table; rows that this rank stores are read where they are."""
    for part, first, last in _spans(route):
        vectors = replace(route.vectors, offsets=_offsets(route)[first : last + 1], spare=arrived)
        rows.read(group, vectors, out[part.table])
        if part.is_mean:
            out[part.table][:] /= _bag_sizes(part, arrived.dtype)


def joined_columns(dims: Mapping[str, int], request: Request) -> tuple[dict[str, int], tuple[int, int]]:
    """The first column of each table where all are side by side, and the shape of the whole."""
    columns, width = {}, 0
    for part in request.parts:
        columns[part.table] = width
        width += dims[part.table]
    counts = {part.num_vectors for part in request.parts}
    if len(counts) > 1:
        raise DataError(
            f"vectors of several tables can be side by side where all have as many; the ticket's have "
            f"{', '.join(str(count) for count in sorted(counts))}: give lengths=, or pull() them by table"
        )
    return columns, (counts.pop() if counts else 0, width)


def fill_joined(
    rows: Rows, group: int, route: GroupRoute, arrived: Floats, columns: Mapping[str, int], out: Floats
) -> None:
    """The same into columns of one array, where all tables have a vector for each of its rows."""
    parts = route.wanted.parts
    if not parts:
        return
    arena, vectors = rows.groups[group].arena, route.vectors
    dim = arrived.shape[1]
    with rows.records.shared():
        pool_rows(
            arena.addresses, arena.shift, arena.width, vectors.locations, arrived.ctypes.data,
            vectors.inverse, vectors.offsets, np.array([columns[part.table] for part in parts]), dim,
            np.zeros(len(parts), np.bool_), np.empty(0, out.dtype), out, out.ctypes.data,
        )  # fmt: skip
    for part in parts:
        if part.is_mean:
            first = columns[part.table]
            out[:, first : first + dim] /= _bag_sizes(part, out.dtype)


def sum_gradients(route: GroupRoute, given: Tables, sums: Floats) -> None:
    """Sum the gradients of all vectors for each vector that came.

    Gradients may be columns of a wider array.
    """
    sums[:] = 0
    vectors = route.vectors
    for part, first, last in _spans(route):
        gradients = given[part.table]
        if part.is_mean:
            gradients = gradients / _bag_sizes(part, gradients.dtype)
        offsets = _offsets(route)[first : last + 1]
        add_gradients(vectors.inverse, offsets, gradients.ctypes.data, gradients.strides[0], sums)


def _spans(route: GroupRoute) -> Iterator[tuple[TableKeys, int, int]]:
    """Every part, and where its vectors begin and end."""
    first = 0
    for part in route.wanted.parts:
        yield part, first, first + part.num_vectors
        first += part.num_vectors


def _offsets(route: GroupRoute) -> npt.NDArray[np.int64]:
    assert route.vectors.offsets is not None
    return route.vectors.offsets


def _bag_sizes(part: TableKeys, dtype: npt.DTypeLike) -> Floats:
    assert part.offsets is not None
    return np.maximum(np.diff(part.offsets), 1).astype(dtype).reshape(-1, 1)
