"""Rows of several columns, by table, sent from every rank to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.ring import join
from rowhaul.database.rows import Rows
from rowhaul.transport.base import Bytes

Columns = dict[str, tuple[npt.NDArray[Any], ...]]  # by table; all columns of a table are of one length


def send(
    calls: Calls, rows: Rows, given: Sequence[Columns], kinds: Sequence[str], what: str, subject: int
) -> list[Columns]:
    """Send ``given[p]`` to rank ``p``, and return what every rank sent here.

    Args:
        calls: the sequence that this is part of.
        rows: whose tables they are.
        given: a table may be left out.
        kinds: of the columns: ``"key"`` (or anything of 64 bits), or ``"record"``.
        what: the operation.
        subject: its subject.
    """
    names = [spec.name for spec in rows.settings.tables]
    counts = np.array([[len(to[name][0]) if name in to else 0 for name in names] for to in given])
    told = calls.tell(what, subject, counts)[:, : len(names)]
    widths = np.array([sum(_layout(rows, name, kind)[2] for kind in kinds) for name in names])
    messages = [join([column for name in names if name in to for column in to[name]]) for to in given]
    arrived = calls.ring.exchange(messages, (told @ widths).tolist())
    return [_parts(rows, names, kinds, told[rank].tolist(), arrived[rank]) for rank in range(len(given))]


def merged(given: Sequence[Columns]) -> Columns:
    """What came from all ranks, one after the other."""
    names = {name for columns in given for name in columns}
    return {
        name: tuple(
            np.concatenate(parts)
            for parts in zip(*(columns[name] for columns in given if name in columns), strict=True)
        )
        for name in sorted(names)
    }


def _layout(rows: Rows, table: str, kind: str) -> tuple[np.dtype[Any], int, int]:
    """Type, elements and bytes of one entry of a column."""
    if kind == "key":
        return np.dtype(np.int64), 1, 8
    arena = rows.groups[rows.places[table].group].arena
    return arena.dtype, arena.width, arena.record_bytes


def _parts(
    rows: Rows, names: Sequence[str], kinds: Sequence[str], counts: Sequence[int], message: Bytes
) -> Columns:
    parts: Columns = {}
    begin = 0
    for name, count in zip(names, counts, strict=True):
        columns = []
        for kind in kinds:
            dtype, width, num_bytes = _layout(rows, name, kind)
            # A copy: parts of a message may begin anywhere, and arrays read whole words.
            column = message[begin : begin + count * num_bytes].copy().view(dtype)
            columns.append(column if kind == "key" else column.reshape(count, width))
            begin += count * num_bytes
        if count:
            parts[name] = tuple(columns)
    return parts
