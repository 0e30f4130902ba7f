"""The exact modes: on demand, full, and a static hot set; they differ in when a trained row goes home."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.saved import Arrays, Saved
from rowhaul.schedule.sync import move_kernels as kernels
from rowhaul.schedule.sync.iteration import Notebook, Outcome, Step, Wiring
from rowhaul.schedule.sync.mode import SyncMode


class ExactExchange:
    """Rows are always trained from their latest version."""

    def __init__(self, mode: SyncMode, wiring: Wiring) -> None:
        self.keeps_split_copies = mode.name == "on-demand"
        self._push_after = mode.name != "on-demand"
        self._keep_copies = mode.caches_rows
        self._wiring = wiring
        self._notebook = Notebook()

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        wiring = self._wiring
        notebook = self._notebook
        notebook.make_room(step)
        states = np.empty(len(step.rows), np.uint8)
        lookups = np.zeros(wiring.num_workers, np.int64)
        hits = np.zeros(wiring.num_workers, np.int64)
        num_moves, num_steps, replicated_rows, replicated_bytes = kernels.exchange(
            step.slots, step.rows, step.trainers, wiring.value_bytes, wiring.state_bytes,
            wiring.first_store, wiring.num_shards, wiring.peer_to_peer, self._push_after, self._keep_copies,
            step.iteration, wiring.look_ahead, notebook.moves, notebook.steps, lookups, hits, states,
            notebook.move_rows, notebook.step_rows,
        )  # fmt: skip
        of_batch, steps_of_batch = num_moves, num_steps
        num_moves, num_steps = kernels.evict(
            step.slots, step.evicted_from, step.victims, wiring.value_bytes, wiring.state_bytes,
            wiring.first_store, wiring.num_shards, step.iteration,
            notebook.moves, num_moves, notebook.steps, num_steps,
        )  # fmt: skip
        notebook.move_rows[of_batch:num_moves] = -1
        notebook.step_rows[steps_of_batch:num_steps] = -1
        moves_between, local_moves = notebook.moves_written(num_moves, wiring.colocated)
        move_rows, local_move_rows = notebook.rows_written()
        return Outcome(
            moves=moves_between,
            local_moves=local_moves,
            steps=notebook.steps_written(num_steps),
            states=states,
            lookups=lookups,
            hits=hits,
            all_reduce_rows=int(replicated_rows),
            all_reduce_bytes=int(replicated_bytes),
            move_rows=move_rows,
            local_move_rows=local_move_rows,
            step_rows=notebook.step_rows[:num_steps].copy(),
        )

    def owing(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """See `Exchange`."""
        return np.zeros(len(slots), np.uint64)

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`: the directory knows everything."""

    def export(self, slots: npt.NDArray[np.int32]) -> Arrays:
        """See `Exchange`: the directory knows everything."""
        return {}

    def restore(self, saved: Saved, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`."""
