"""Rows that stay at home: what ranks read there, and hand over, in every iteration.

Training goes by no such plan: it is what there is to be counted, by simulations and explanations. A home's
own worker reads its rows where they are. The requests, 8 bytes a row, are not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.masks import NOBODY
from rowhaul.schedule.plan import NO_STEPS, Kind, Moves, Payload
from rowhaul.schedule.row_states import State
from rowhaul.schedule.sync.exchange import DirectoryKnowsAll, Outcome, Step, Wiring
from rowhaul.schedule.topology import home_shards


class AtHomeExchange(DirectoryKnowsAll):
    """Every trainer of a row pulls its values, and returns a gradient once it is trained."""

    keeps_split_copies = False

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def step(self, step: Step) -> Outcome:
        """Say what one iteration reads and hands over; rows are at home before and after it."""
        wiring, slots, rows = self._wiring, step.slots, step.rows
        tables, keys, states = slots["table"][rows], slots["key"][rows], slots["state"][rows]
        homes = home_shards(tables, keys, wiring.first_store, wiring.num_shards)
        lookups, hits = (np.zeros(wiring.num_workers, np.int64) for _ in range(2))
        read: list[tuple[npt.NDArray[np.int64], int]] = []
        for worker in range(wiring.num_workers):
            needed = np.flatnonzero(step.trainers >> np.uint64(worker) & np.uint64(1))
            elsewhere = needed[homes[needed] != worker]
            lookups[worker], hits[worker] = len(needed), len(needed) - len(elsewhere)
            read.append((elsewhere, worker))
        places = np.concatenate([some for some, _ in read])
        workers = np.repeat(np.arange(len(read), dtype=np.int16), [len(some) for some, _ in read])
        there = homes[places]

        def moves(kind: Kind, payload: Payload, source: Any, target: Any, *, after: bool) -> Moves:
            count = len(places)
            return Moves(
                kind=np.full(count, kind, np.uint8),
                payload=np.full(count, payload, np.uint8),
                table=tables[places],
                key=keys[places],
                source=source,
                target=target,
                num_bytes=wiring.value_bytes[tables[places]],
                ready=np.full(count, step.iteration, np.int32),
                after=np.full(count, after, np.uint8),
                second=np.zeros(count, np.uint8),
            )

        slots["state"][rows], slots["members"][rows] = State.HOME, NOBODY
        slots["touched"][rows] = step.iteration
        pulls = moves(Kind.MISS_PULL, Payload.VALUES, there, workers, after=False)
        pushes = moves(Kind.UPDATE_PUSH, Payload.GRADIENT, workers, there, after=True)
        numbers = places.astype(np.int32)
        return Outcome(
            moves=pulls.followed_by(pushes),
            local_moves=None,
            steps=NO_STEPS,
            states=states,
            lookups=lookups,
            hits=hits,
            all_reduce_rows=0,
            all_reduce_bytes=0,
            move_rows=np.concatenate([numbers, numbers]),
        )
