"""Gradients that wait for a step, and their sums: one for every record, added in the order they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.store.database.kernels import add_rows
from rowhaul.store.database.leases import Lease
from rowhaul.store.kernels import deduplicate

Int64s = npt.NDArray[np.int64]
Sums = tuple[int, Int64s, npt.NDArray[Any]]  # group, records, gradients


@dataclass(frozen=True)
class Gradients:
    """Gradients of distinct records of one table, and the lease under which the records were found."""

    lease: Lease
    group: int
    table: str
    records: Int64s
    gradients: npt.NDArray[Any]  # records x dim


def sum_by_record(
    parts: Sequence[Gradients], without_deleted: Callable[[Gradients], tuple[Int64s, npt.NDArray[Any]]]
) -> list[Sums]:
    """The sum for every record, table by table; parts are added in order, the first to nothing."""
    by_table: dict[str, list[Gradients]] = {}
    for part in parts:
        by_table.setdefault(part.table, []).append(part)
    sums = []
    for some in by_table.values():
        kept = [without_deleted(part) for part in some]
        kept = [(records, gradients) for records, gradients in kept if len(records)]
        if kept:
            sums.append((some[0].group, *(kept[0] if len(kept) == 1 else _summed(kept))))
    return sums


def _summed(parts: Sequence[tuple[Int64s, npt.NDArray[Any]]]) -> tuple[Int64s, npt.NDArray[Any]]:
    records = np.concatenate([records for records, _ in parts])
    distinct, places = np.empty_like(records), np.empty(len(records), np.int32)
    slots = np.zeros(1 << max(4, (2 * len(records)).bit_length()), np.int32)
    count = deduplicate(
        records,
        np.array([0, len(records)]),
        np.zeros(1, np.int64),
        slots,
        distinct,
        places,
        np.empty(2, np.int64),
    )
    first = parts[0][1]
    sums = np.zeros((count, first.shape[1]), first.dtype)
    begin = 0
    for some, gradients in parts:
        add_rows(gradients, places[begin : begin + len(some)], sums)
        begin += len(some)
    return distinct[:count], sums
