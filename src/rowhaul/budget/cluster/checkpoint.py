"""Rows of a budget in a cluster's checkpoint: records by the rows' names, as of whole rows, beside the maps.

The maps are the same for any number of ranks: they are kept in a file of their own, as one process writes it.
Homes hold all rows that there are, trained or not, so a checkpoint has them, too.
"""

from __future__ import annotations

from typing import Any

from rowhaul.budget import saved
from rowhaul.budget.layout import SlotLayout
from rowhaul.budget.scheduling import MAPS, SlotScheduler
from rowhaul.checkpoint import CheckpointReader
from rowhaul.schedule import Scheduler
from rowhaul.schedule.arrays import Arrays, named
from rowhaul.train.deferred import DeferredWriter
from rowhaul.train.distributed.cluster_rows import ClusterRows
from rowhaul.train.distributed.training import DistributedTraining


class SlotClusterRows(ClusterRows):
    """Saves and loads rows within a budget."""

    def write_scheduler(
        self, writer: DeferredWriter, training: DistributedTraining, gathered: Any, state: Arrays
    ) -> None:
        """Write the maps apart from the scheduler's other state."""
        prefix = f"{MAPS}."
        maps = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
        writer.arrays(saved.FILE, maps, given=True)

    def scheduler_state(self, reader: CheckpointReader) -> Arrays:
        """Return the maps as a part of the scheduler's state."""
        return named(MAPS, _maps(reader))

    def facts(self, training: DistributedTraining) -> dict[str, Any]:
        """Return what the manifest says of the budget."""
        layout = training.layout
        assert isinstance(layout, SlotLayout)
        return {saved.FACT: saved.fact_of(layout.make_maps(), f"{saved.FILE}.safetensors")}

    def load(self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None) -> None:
        """Replace the rows that a home began with by those of a checkpoint."""
        home = training.runtime.mover.home
        if home is not None:
            home.clear()
        super().load(reader, training, mine)

    def start_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Introduce a checkpoint's maps and rows to a new scheduler, on another cluster."""
        assert isinstance(scheduler, SlotScheduler)
        scheduler.maps.load_state(_maps(reader))
        super().start_scheduler(scheduler, reader)


def _maps(reader: CheckpointReader) -> Arrays:
    return reader.arrays(reader.facts[saved.FACT]["file"])
