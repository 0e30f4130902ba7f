"""Rows that training would refuse: found while a log is prepared, where their raw line can be named."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rowhaul.data.columns import Mask, label_numbers
from rowhaul.data.formats.source import BadRows
from rowhaul.data.schema import Schema
from rowhaul.data.targets import known_labels, weight_numbers


def refused_targets(rows: Mapping[str, pa.Array], schema: Schema) -> dict[str, Mask]:
    """Where labels and the weight cannot be trained on, by column; of several labels one may be missing."""
    refused: dict[str, Mask] = {}
    for one in schema.tasks:
        allowed = label_numbers(rows[one.name], one)[1]
        refused[one.name] = known_labels(rows[one.name]) & ~allowed if schema.labels else ~allowed
    if schema.weight:
        refused[schema.weight] = ~weight_numbers(rows[schema.weight])[1]
    return refused


def bad_rows(rows: Mapping[str, pa.Array], refused: Mapping[str, Mask], schema: Schema) -> BadRows | None:
    """The rows refused for any of their columns, and for each the first of them."""
    if not any(mask.any() for mask in refused.values()):
        return None

    def reason(row: int) -> str:
        name = next(name for name, mask in refused.items() if mask[row])
        value = rows[name][row].as_py()
        if value is None:
            return f"column {name}: the {'weight' if name == schema.weight else 'label'} is missing"
        return f"column {name}: {value!r} is not {_needed(name, schema)}"

    return BadRows(np.logical_or.reduce(list(refused.values())), reason)


def _needed(name: str, schema: Schema) -> str:
    if name == schema.weight:
        return "a finite number, 0 or more"
    for label in schema.tasks:
        if label.name == name and label.kind == "binary":
            return "a number" if label.positive_from is not None else "0 or 1"
    return "a finite float32"
