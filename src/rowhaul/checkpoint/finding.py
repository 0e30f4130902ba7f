"""Some rows of a checkpoint by their keys, without reading the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.store.row_parts import FoundRow


def find_rows(
    reader: CheckpointReader,
    table: str,
    keys: npt.ArrayLike,
    progress: Callable[[str], None] = lambda file: None,
) -> dict[int, FoundRow]:
    """Return the rows of those of ``keys`` that a table has.

    Of a file without any of them only the keys are read, besides its checksum; ``progress`` is called with
    each file that is done.
    """
    wanted = np.unique(np.asarray(keys, np.int64))
    found: dict[int, FoundRow] = {}
    entry, format = reader.tables[table], reader.format(table)
    names = format.row_names(reader, table, wanted)  # several ids may read one row
    for name in entry.files:
        with reader.open(name) as file:
            held: npt.NDArray[np.int64] = file.get_tensor("keys")
            for place in np.flatnonzero(np.isin(held, names)).tolist():
                row = format.find(file, place, entry.dim)
                found |= dict.fromkeys(wanted[names == held[place]].tolist(), row)
        progress(name)
    return found
