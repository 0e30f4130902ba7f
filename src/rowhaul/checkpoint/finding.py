"""Some rows of a checkpoint by their keys, without reading the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from rowhaul.checkpoint.reader import CheckpointReader

Int64s = npt.NDArray[np.int64]


def find_rows(
    reader: CheckpointReader,
    table: str,
    keys: npt.ArrayLike,
    progress: Callable[[str], None] = lambda file: None,
) -> dict[int, npt.NDArray[Any]]:
    """The records, values before state, of those of ``keys`` that a table has.

    Of a file without any of them only the keys are read, besides its checksum; ``progress`` is told each
    file that is done.
    """
    wanted = np.unique(np.asarray(keys, np.int64))
    found: dict[int, npt.NDArray[Any]] = {}
    for name in reader.tables[table].files:
        with safetensors.safe_open(reader.verified(name), framework="numpy") as file:
            held: Int64s = file.get_tensor("keys")
            places = np.flatnonzero(np.isin(held, wanted))
            parts = [part for part in ("values", "state") if part in file.keys()]  # noqa: SIM118 - no mapping
            for place in places.tolist() if parts else ():
                rows = [file.get_slice(part)[place : place + 1] for part in parts]
                found[int(held[place])] = np.concatenate(rows, axis=1)[0]
        if not parts and len(places):  # pruned: chunks of rows, none of which can be found alone
            ((_, records),) = reader.rows(table, among={name})
            found |= {int(held[place]): records[place] for place in places.tolist()}
        progress(name)
    return found
