"""Gradients that wait for a step, and their sums: one for every record, added in the order they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.gather_kernels import merge_rows
from rowhaul.database.leases import Lease

Int64s = npt.NDArray[np.int64]
Sums = tuple[int, Int64s, npt.NDArray[Any]]  # group, records, gradients


@dataclass(frozen=True)
class Gradients:
    """Gradients of distinct records, and the lease under which the records were found."""

    lease: Lease
    group: int
    table: str | None  # of all records; None where they are of any tables of the group
    records: Int64s
    gradients: npt.NDArray[Any]  # records x dim


def sum_by_record(
    parts: Sequence[Gradients], without_deleted: Callable[[Gradients], tuple[Int64s, npt.NDArray[Any]]]
) -> list[Sums]:
    """The sum for every record, table by table; parts are added in order, the first to nothing."""
    by_table: dict[tuple[int, str | None], list[Gradients]] = {}
    for part in parts:
        by_table.setdefault((part.group, part.table), []).append(part)
    sums = []
    for (group, _), some in by_table.items():
        kept = [without_deleted(part) for part in some]
        kept = [(records, gradients) for records, gradients in kept if len(records)]
        if kept:
            sums.append((group, *(kept[0] if len(kept) == 1 else _summed(kept))))
    return sums


def _summed(parts: Sequence[tuple[Int64s, npt.NDArray[Any]]]) -> tuple[Int64s, npt.NDArray[Any]]:
    most = sum(len(records) for records, _ in parts)
    first = parts[0][1]
    distinct, sums = np.empty(most, np.int64), np.empty((most, first.shape[1]), first.dtype)
    slots = np.zeros(1 << max(4, (2 * most).bit_length()), np.int32)
    count = 0
    for records, gradients in parts:
        count = merge_rows(records, gradients, slots, count, distinct, sums)
    return distinct[:count], sums[:count]
