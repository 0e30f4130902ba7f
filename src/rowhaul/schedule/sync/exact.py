"""The exact modes: on demand, full, and a static hot set; they differ in when a trained row goes home."""

from __future__ import annotations

import numpy as np

from rowhaul.schedule.sync import kernels
from rowhaul.schedule.sync.exchange import MoveBuffer, Outcome, Step, Wiring
from rowhaul.schedule.sync.mode import SyncMode


class ExactExchange:
    """Rows are always trained from their latest version."""

    def __init__(self, mode: SyncMode, wiring: Wiring) -> None:
        self.keeps_split_copies = mode.name == "on-demand"
        self._push_after = mode.name != "on-demand"
        self._keep_copies = mode.caches_rows
        self._wiring = wiring
        self._buffer = MoveBuffer()

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        wiring = self._wiring
        moves = self._buffer.at_least(step.most_moves)
        states = np.empty(len(step.rows), np.uint8)
        lookups = np.zeros(wiring.num_workers, np.int64)
        hits = np.zeros(wiring.num_workers, np.int64)
        count, replicated_rows, replicated_bytes = kernels.exchange(
            step.slots, step.rows, step.trainers, wiring.value_bytes, wiring.state_bytes,
            wiring.first_store, wiring.num_shards, wiring.peer_to_peer, self._push_after,
            self._keep_copies, step.iteration, wiring.look_ahead, moves, lookups, hits, states,
        )  # fmt: skip
        count = kernels.evict(
            step.slots, step.evicted_from, step.victims, wiring.value_bytes, wiring.state_bytes,
            wiring.first_store, wiring.num_shards, step.iteration, moves, count,
        )  # fmt: skip
        return Outcome(
            self._buffer.first(count), states, lookups, hits, int(replicated_rows), int(replicated_bytes)
        )
