"""From the directory to a dispatcher's task: where a batch's rows are, in the dispatcher's terms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.directory import Directory, LocatedBatch
from rowhaul.schedule.directory.describing_kernels import describe, describe_after
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.sync.mode import SyncMode
from rowhaul.schedule.topology import Topology


def blind_task(
    batch: LocatedBatch, prices: npt.NDArray[np.int64], capacities: npt.NDArray[np.int64], seed: int
) -> DispatchTask:
    """The task of dividing ``batch`` without a look at where its rows are (see `is_blind`)."""
    masks, sizes = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return DispatchTask(
        offsets=batch.offsets,
        rows=batch.rows,
        tables=batch.tables,
        latest=masks,
        owner=np.zeros(0, np.int16),
        partial=masks,
        free=np.zeros(0, np.uint8),
        home=np.zeros(0, np.int16),
        record_size=sizes,
        value_size=sizes,
        next_use=batch.next_use,
        prices=prices,
        capacities=capacities,
        seed=seed,
    )


class TaskBuilder:
    """Describes batches to dispatchers."""

    def __init__(self, topology: Topology, sizes: RowSizes) -> None:
        self._topology = topology
        unit = sizes.unit
        self._record_sizes = np.array(sizes.records, np.int64) // unit
        self._value_sizes = np.array(sizes.values, np.int64) // unit

    def build(
        self,
        directory: Directory,
        batch: LocatedBatch,
        prices: npt.NDArray[np.int64],
        capacities: npt.NDArray[np.int64],
        seed: int,
    ) -> DispatchTask:
        """The task of dividing ``batch`` as the directory stands."""
        num_shards = self._topology.sharding if self._topology.colocated else 0
        tables, latest, owner, partial, free, home, record_size, value_size, next_use = describe(
            directory.slots,
            batch.slots,
            batch.next_use,
            batch.number,
            num_shards,
            self._topology.peer_to_peer,
            self._record_sizes,
            self._value_sizes,
        )
        return DispatchTask(
            offsets=batch.offsets,
            rows=batch.rows,
            tables=tables,
            latest=latest,
            owner=owner,
            partial=partial,
            free=free,
            home=home,
            record_size=record_size,
            value_size=value_size,
            next_use=next_use,
            prices=prices,
            capacities=capacities,
            seed=seed,
            peer_to_peer=self._topology.peer_to_peer,
        )

    def after(
        self,
        task: DispatchTask,
        trainers: npt.NDArray[np.uint64],
        states: npt.NDArray[np.uint8],
        mode: SyncMode,
        following: DispatchTask,
        shared: npt.NDArray[np.int64],
        places: npt.NDArray[np.int32],
    ) -> DispatchTask:
        """Bring ``following`` to what it will be when ``task`` has been trained by ``trainers``.

        Args:
            task: the batch that is trained.
            trainers: its rows: who trains each.
            states: its rows: the `State` before.
            mode: how trained rows travel.
            following: the batch after it, as it would be without this one; changed in place.
            shared: rows of ``task`` that ``following`` needs too,
            places: and where they stand there.
        """
        describe_after(
            trainers, task.owner, task.record_size > task.value_size, states, shared, places,
            mode.name == "on-demand", mode.name != "static", mode.staleness > 0,
            self._topology.peer_to_peer, following.latest, following.owner, following.partial, following.free,
        )  # fmt: skip
        return following
