"""Columns of a generated log as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rowhaul.data.generate.generator import LabelledColumns, LogGenerator

Bools = npt.NDArray[np.bool_]


def lines(columns: Sequence[pa.Array], delimiter: str, missing: str = "") -> bytes:
    """One line per sample, each ended by a newline."""
    joined = pc.binary_join_element_wise(
        *columns, delimiter, null_handling="replace", null_replacement=missing
    )
    return ("\n".join(joined.to_pylist()) + "\n").encode()


def integers(values: npt.NDArray[np.integer] | Bools) -> pa.Array:
    """Decimal numbers."""
    return pa.array(values.astype(np.int64)).cast(pa.string())


def decimal(values: npt.NDArray[np.float32], decimals: int, missing: Bools | None = None) -> pa.Array:
    """Numbers with as many decimals as they were rounded to."""
    exact = pa.array(np.round(values.astype(np.float64), decimals), mask=missing)
    return (exact if decimals else exact.cast(pa.int64())).cast(pa.string())


def numbers(generator: LogGenerator, samples: LabelledColumns) -> list[pa.Array]:
    """The dense columns."""
    columns = samples.columns
    return [
        decimal(values, dense.decimals, missing)
        for dense, values, missing in zip(
            generator.preset.dense, columns.numbers, columns.missing_numbers, strict=True
        )
    ]


def id_tokens(generator: LogGenerator, samples: LabelledColumns) -> list[pa.Array]:
    """The columns of single ids."""
    columns = samples.columns
    return [
        where_present(field.naming.tokens(ranks), missing)
        for field, ranks, missing in zip(
            generator.preset.ids, columns.ranks, columns.missing_ids, strict=True
        )
    ]


def where_present(tokens: pa.Array, missing: Bools) -> pa.Array:
    """The tokens, null where missing."""
    return pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), tokens) if missing.any() else tokens
