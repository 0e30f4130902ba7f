"""Row states between two iterations, as plain arrays: for whoever settles rows, or compares them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.directory import Directory, State
from rowhaul.schedule.sync import Exchange


def row_states(directory: Directory, exchange: Exchange, iteration: int) -> dict[str, npt.NDArray[Any]]:
    """The rows that are not simply at home, by (table, key), before an iteration; see `Scheduler.states`."""
    placed = directory.placed_rows()
    columns = ("table", "key", "state", "members", "settled", "base", "trained")
    rows = {name: directory.slots[name][placed] for name in columns}
    split = rows["state"] == State.SPLIT
    nobody = np.uint64(0)
    owing = exchange.owing(placed)
    trained = np.where(owing != nobody, np.int32(iteration - 1), np.int32(-1))
    return {
        "tables": rows["table"],
        "keys": rows["key"],
        "state": rows["state"],
        "latest": np.where(split, nobody, rows["members"]),
        "partial": np.where(split, rows["members"], owing),
        "settled": rows["settled"],
        "base": rows["base"],
        "trained": np.where(split, rows["trained"], trained),
    }
