"""Labels, weights and groups of samples: what is learned and measured, beside what is read.

Of several labels a missing one is NaN: the sample counts for nothing in that task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rowhaul.data.columns import (
    Float32s,
    Int64s,
    Mask,
    Origin,
    decode_ids,
    decode_label,
    label_numbers,
    plain_numbers,
)
from rowhaul.data.schema import LabelColumn, Schema
from rowhaul.errors import DataError


@dataclass(frozen=True)
class Targets:
    """Of some samples; None where the schema names no such column."""

    labels: Float32s | None = None  # samples, or samples x labels
    weights: Float32s | None = None  # samples
    groups: Int64s | None = None  # samples

    def map(self, change: Callable[..., Any]) -> Targets:
        """The same change made to each of them."""
        return Targets(
            *(None if one is None else change(one) for one in (self.labels, self.weights, self.groups))
        )


NO_TARGETS = Targets()


def join_targets(parts: Sequence[Targets]) -> Targets:
    """Those of several runs of samples, in order."""
    columns = zip(*((one.labels, one.weights, one.groups) for one in parts), strict=True)
    return Targets(*(None if column[0] is None else np.concatenate(column) for column in columns))


def decode_targets(rows: pa.RecordBatch, schema: Schema, origin: Origin) -> Targets:
    """Read the labels, the weight and the group of some rows; what cannot be learned from is refused."""
    labels: Float32s | None = None
    if schema.labels:
        labels = decode_labels(rows, schema.labels, origin)
    elif schema.label is not None:
        column = rows.column(schema.label.name)
        labels = decode_label(column, schema.label, origin)
    return Targets(
        labels,
        _decode_weight(rows.column(schema.weight), schema.weight, origin) if schema.weight else None,
        _decode_group(rows.column(schema.group), schema.group, origin) if schema.group else None,
    )


def decode_labels(rows: pa.RecordBatch, wanted: tuple[LabelColumn, ...], origin: Origin) -> Float32s:
    """Return samples x labels; NaN where one is missing, or is after one that is not 1."""
    labels = np.empty((rows.num_rows, len(wanted)), np.float32)
    names = [one.name for one in wanted]
    for position, one in enumerate(wanted):
        column = rows.column(one.name)
        known = known_labels(column)
        numbers, allowed = label_numbers(column, one)
        _check(column, known & ~allowed, one.name, origin)
        labels[:, position] = np.where(known, numbers, np.float32(np.nan))
        if one.after:
            labels[labels[:, names.index(one.after)] != 1, position] = np.nan
    return labels


def known_labels(column: pa.Array) -> Mask:
    """Where a label is neither null nor NaN."""
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return np.asarray(valid & ~np.isnan(plain_numbers(column).astype(np.float64)), np.bool_)


def weight_numbers(column: pa.Array) -> tuple[Float32s, Mask]:
    """The numbers of a weight, nulls as 0, and which of them can be trained on."""
    with np.errstate(over="ignore"):  # too large for float32 becomes infinity
        weights = plain_numbers(column).astype(np.float32)
    allowed = np.isfinite(weights) & (weights >= 0) & column.is_valid().to_numpy(zero_copy_only=False)
    return weights, np.asarray(allowed, np.bool_)


def _check(column: pa.Array, bad: Mask, name: str, origin: Origin) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise DataError(
            f"{origin.at(row)}: label {name!r} is {column[row].as_py()}; 0, 1 or nothing (null) is needed; "
            "for a rating or a count, set `positive_from` or `kind: number` in the schema"
        )


def _decode_weight(column: pa.Array, name: str, origin: Origin) -> Float32s:
    weights, allowed = weight_numbers(column)
    if not allowed.all():
        row = int(np.argmin(allowed))
        raise DataError(
            f"{origin.at(row)}: weight {name!r} is {column[row].as_py()}; a finite number, 0 or more, is "
            "needed for every sample"
        )
    return weights


def _decode_group(column: pa.Array, name: str, origin: Origin) -> Int64s:
    groups = decode_ids(column)
    if groups.offsets is not None:
        row = int(np.argmax(np.diff(groups.offsets) != 1))
        raise DataError(
            f"{origin.at(row)}: group {name!r} is {column[row].as_py()}; one integer or string is needed for "
            "every sample"
        )
    return groups.values
