"""The rows of a cluster's checkpoint: what one rank writes and loads of them.

This class is for formats whose records are rows: `WholeRows` and what derives from it. Others name a class of
their own as `RowFormat.cluster_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rowhaul._activity import progressed
from rowhaul.checkpoint import CheckpointReader, ShardWriter
from rowhaul.runtime.flush import flushed_blocks
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import Scheduler, homes_of
from rowhaul.store.row_format import RowFormat, load_named
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.training import DistributedTraining

SCHEDULE = "schedule"  # file of the scheduler's state


def cluster_rows(format: RowFormat, tables: Sequence[str]) -> ClusterRows:
    """Return what saves and loads tables in a format."""
    rows: ClusterRows = load_named(format.cluster_rows)(format, tables)
    return rows


class ClusterRows:
    """Saves and loads the rows of tables, named in the order that plans number them, on one rank."""

    def __init__(self, format: RowFormat, tables: Sequence[str]) -> None:
        self.format, self.tables = format, list(tables)

    def gather(self, training: DistributedTraining) -> Any:
        """Collect what ranks need of each other to write their rows; a collective call."""
        return None

    def write(
        self,
        shard: ShardWriter,
        label: str,
        training: DistributedTraining,
        flushed: RowMemory | None,
        gathered: Any,
    ) -> None:
        """Write the rows that this rank is home of, and what it knows beside them."""
        home, layout, format = training.runtime.mover.home, training.layout, self.format
        assert isinstance(format, WholeRows)
        if home is None or flushed is None:
            return
        for number, spec in enumerate(layout.specs):
            blocks = (format.encode(*rows, spec.dim) for rows in flushed_blocks(home, flushed, number))
            width = layout.optimizer.state_width(spec.dim)
            shard.blocks(spec.name, blocks, spec.dim, width, layout.dtype, format.name)

    def write_scheduler(self, shard: ShardWriter, training: DistributedTraining, gathered: Any) -> None:
        """Write what the scheduler knows beside its state, on the rank that writes that."""

    def facts(self, training: DistributedTraining) -> dict[str, Any]:
        """Return what the manifest says of the rows."""
        return {}

    def saved_layout(self, reader: CheckpointReader, layout: TableLayout) -> TableLayout:
        """Return the tables as a checkpoint has them."""
        return layout

    def load(self, reader: CheckpointReader, training: DistributedTraining, mine: set[str] | None) -> None:
        """Load this rank's own files into its home; None: the rows that it is home of now.

        Rows that all workers hold are loaded into every cache then.
        """
        mover, settings = training.runtime.mover, training.settings
        hot = settings.hot if mover.cache is not None and mine is None else None
        if mover.home is None and hot is None:
            return
        for number, name in enumerate(self.tables):
            for keys, records in reader.rows(name, among=mine):
                progressed()
                if mover.home is not None:
                    here = np.ones(len(keys), np.bool_)
                    if mine is None:
                        numbers = np.full(len(keys), number)
                        here = homes_of(numbers, keys, settings.topology) == training.runtime.rank
                    sidecar.load(mover.home, number, keys[here], records[here])
                if mover.cache is not None and hot is not None:
                    held = np.isin(keys, hot.keys[hot.tables == number])
                    sidecar.load(mover.cache, number, keys[held], records[held])

    def restore_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Complete a scheduler that has been restored; on the same cluster."""

    def start_scheduler(self, scheduler: Scheduler, reader: CheckpointReader) -> None:
        """Introduce a checkpoint's rows to a new scheduler, on another cluster."""
        for number, name in enumerate(self.tables):
            for keys in reader.keys(name):
                scheduler.mark_trained(np.full(len(keys), number, np.int32), keys)
