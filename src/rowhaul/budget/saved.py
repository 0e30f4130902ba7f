"""Maps of slots in checkpoints: a file of their arrays, and what a manifest says of the budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from rowhaul._quantities import bytes_text
from rowhaul.budget.maps import SlotMaps
from rowhaul.budget.settings import BudgetSettings
from rowhaul.budget.slots import Int64s, SlotMap
from rowhaul.errors import CheckpointError
from rowhaul.store.served_rows import SlotPlaces

FACT = "budget"  # of a checkpoint's facts: how its rows were chosen
FILE = "budget"  # of the maps


def fact_of(maps: SlotMaps, file: str) -> dict[str, Any]:
    """Return what a manifest says of the budget; ``file`` has the maps."""
    tables = [list(one.names) for one in maps.maps]
    return {**asdict(maps.settings), "seed": maps.seed, "tables": tables, "file": file}


def settings_of(fact: dict[str, Any]) -> BudgetSettings:
    """Return the settings that a manifest tells."""
    return BudgetSettings(**{name: fact[name] for name in BudgetSettings.__dataclass_fields__})


def budget_text(settings: BudgetSettings) -> str:
    """Describe a budget in a few words."""
    size = f"{bytes_text(settings.bytes)} ({settings.bytes:,} bytes)"
    return f"a budget of {size}, {100 * settings.shared:g}% of it shared"


def check_same(path: Any, fact: dict[str, Any], settings: BudgetSettings, seed: int) -> None:
    """Refuse a checkpoint whose rows were chosen within another budget, or found by other hashes."""
    theirs = settings_of(fact)
    if (theirs.bytes, theirs.shared) != (settings.bytes, settings.shared):
        raise CheckpointError(
            f"{path} was trained within {budget_text(theirs)}; here it is {budget_text(settings)}. A map of "
            "rows cannot become larger or smaller: use the same prune.budget and prune.shared, or train anew"
        )
    if fact["seed"] != seed:
        raise CheckpointError(
            f"{path} was trained with seed {fact['seed']}, and here it is {seed}: it decides which rows ids "
            "read; use the same seed"
        )


def saved_map(reader: Any, table: str) -> tuple[SlotMap, int]:
    """Return the map that finds a checkpoint's rows of a table, and the table's position in it."""
    fact = reader.facts[FACT]
    number = next(place for place, names in enumerate(fact["tables"]) if table in names)
    arrays = {
        name.partition(".")[2]: array
        for name, array in reader.arrays(fact["file"]).items()
        if name.partition(".")[0] == str(number)
    }
    names = fact["tables"][number]
    return SlotMap.from_state(names, fact["seed"], settings_of(fact), arrays), names.index(table)


def places_of(reader: Any, table: str) -> SlotPlaces:
    """Return what finds the rows of a checkpoint's table in a file to serve from."""
    found, position = saved_map(reader, table)
    arrays, shared = found.finding(), found.shared_sizes
    return SlotPlaces(
        found.names,
        arrays["marks"],
        arrays["owners"],
        position,
        int(found.seeds[position]),
        int(shared[:position].sum()),
        int(shared[position]),
        int(shared.sum()),
    )


def names_of_ids(reader: Any, table: str, ids: Int64s) -> Int64s:
    """Return the names of the rows that ids of a table read in a checkpoint."""
    found, position = saved_map(reader, table)
    starts = np.where(np.arange(len(found.names) + 1) > position, len(ids), 0)
    return found.find(ids, starts).rows
