"""Another set of replicated rows between two plans: who enters it, who leaves it, and where they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.settings import HotRows

NO_ROWS = HotRows(np.zeros(0, np.int32), np.zeros(0, np.int64))


@dataclass(frozen=True)
class Replacement:
    """What changes when rows enter and leave the replicated set, ordered by (table, key)."""

    entering: HotRows
    states: npt.NDArray[np.uint8]  # entering rows: the state before
    leaving: HotRows


def difference(rows: HotRows, others: HotRows) -> HotRows:
    """The rows that are not among the others, ordered by (table, key), each once."""
    apart = np.setdiff1d(_pairs(rows), _pairs(others))
    return HotRows(apart["table"], apart["key"])


def _pairs(rows: HotRows) -> npt.NDArray[Any]:
    pairs = np.empty(len(rows), [("table", np.int32), ("key", np.int64)])
    pairs["table"], pairs["key"] = rows.tables, rows.keys
    return pairs
