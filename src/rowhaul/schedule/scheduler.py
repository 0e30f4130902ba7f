"""The scheduler: from a stream of id batches to one plan an iteration.

Every rank runs it on the same ids with the same settings and control records and gets the same plans, so that
nothing but row payloads has to cross the wire. It reads no clock and draws nothing that the seed does not
decide.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError, ConfigError, DataError
from rowhaul.schedule.arrays import DIGEST_BYTES, Arrays, Saved, named, text_array
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.control import ActiveControls, ControlRecord, Value
from rowhaul.schedule.directory import LocatedBatch
from rowhaul.schedule.directory.slots import link_uses
from rowhaul.schedule.dispatching import Dispatching
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.row_tracker import PlacedRows, Replacement, RowTracker
from rowhaul.schedule.settings import HotRows, ScheduleSettings, differences
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.threads import Threads
from rowhaul.schedule.untracked_rows import UntrackedRows

FORMAT = 1  # of exported states


class Scheduler:
    """Plans iterations one after the other.

    Example:
        >>> from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, ScheduleSettings, Topology
        >>> settings = ScheduleSettings(
        ...     topology=Topology(num_workers=2), sizes=RowSizes(values=(64,), state=(0,)),
        ...     prices=(1, 10), cache=CacheSettings(capacity=4), dispatcher="esd:1", first_touch=False)
        >>> ids = IdBatch.from_features([0], np.array([7, 7, 8, 8]), np.ones((1, 4), np.int32))
        >>> scheduler = Scheduler(settings, [ids, ids])
        >>> while scheduler.fill():
        ...     plan = scheduler.plan()
        ...     print(plan.worker, len(plan.moves))
        [0 0 1 1] 2
        [0 0 1 1] 0
    """

    def __init__(self, settings: ScheduleSettings, batches: Iterable[IdBatch]) -> None:
        self.settings = settings
        self._threads = Threads()
        self.iteration = 0  # the next one to plan
        self._first = 0  # the first one that it plans
        self._source: Iterator[IdBatch] = iter(batches)
        self._exhausted = False
        self._window: deque[LocatedBatch] = deque()
        self._samples_planned = 0
        self._failed = False
        self._active = ActiveControls(settings.dispatcher, settings.prices, settings.shares)
        self._tracker = RowTracker(settings, self._threads)
        self._dispatching = Dispatching(settings, self._tracker.directory, self._active, self._threads)

    def fill(self) -> bool:
        """Read batches until the window is full; false when nothing is left to plan.

        Only this waits for the source of ids and looks rows up; `plan` never waits.
        """
        self._tracker.release()  # here, where it delays no plan
        while not self._exhausted and len(self._window) <= self.settings.look_ahead:
            ids = next(self._source, None)
            if ids is None:
                self._exhausted = True
            else:
                self._add_to_window(ids)
        return bool(self._window)

    def use_threads(self, count: int) -> None:
        """Plan with this many threads: it changes how long plans take, and nothing else."""
        self._threads.use(count)

    def count_no_rows(self) -> None:
        """Before anything is read: leave rows out of plans by which none moves, which is quicker."""
        if not self.settings.sync_mode.plans_rows:
            self._tracker = UntrackedRows(self.settings, self._threads)
            directory = self._tracker.directory
            self._dispatching = Dispatching(self.settings, directory, self._active, self._threads)

    def post(self, name: str, value: Value) -> ControlRecord:
        """Make a control record now, after the last plan; it is active two iterations later."""
        return self._active.post(name, value, next_iteration=self.iteration)

    def receive(self, record: ControlRecord) -> None:
        """Add a control record that another rank has posted; a refused one changes nothing."""
        self._active.receive(record, next_iteration=self.iteration)

    def plan(self) -> Plan:
        """Plan the next iteration; call `fill` before."""
        if self._failed:
            raise DataError("planning has failed before and cannot continue; make a new scheduler")
        if not self._window:
            raise DataError("there is no batch to plan: call fill() first, and stop when it returns False")
        self._failed = True  # unless this one succeeds: half of an iteration may have been carried out
        controls = self._active.advance(self.iteration)
        batch = self._window.popleft()
        num_admitted = self._tracker.directory.admit(batch)
        self._dispatching.learn(self.iteration, self._samples_planned)
        following = self._window[0] if self._window else None
        given_up: tuple[int, ...] = ()
        worker = self._dispatching.assign(batch, following)
        # No run may end because of shares that were chosen for speed.
        if self._active.has_chosen_shares and not self._tracker.have_room(batch, worker):
            given_up = self._active.give_up_shares()
            worker = self._dispatching.assign(batch, following)
        plan = self._tracker.carry_out(batch, worker, count_uses=self._active.learner is not None)
        self.iteration += 1
        self._samples_planned += batch.num_samples
        self._failed = False
        summing = self._active.summing
        return replace(
            plan, controls=controls, num_admitted=num_admitted, summing=summing, given_up_shares=given_up
        )

    def placed(self) -> PlacedRows:
        """Return the rows that are not simply at home, between two iterations, for `states`."""
        return self._tracker.placed()

    def states(self, rows: PlacedRows | None = None) -> dict[str, npt.NDArray[Any]]:
        """The rows that are not simply at home, or some of them, by (table, key), between two iterations.

        Masks have bit j for worker j: ``latest`` holds the record, ``partial`` owes a gradient, ``settled``
        has pushed it, ``base`` holds the record from before the step (with bounded staleness: any copy).
        ``trained`` is the iteration that the gradients of a SPLIT row are from (with bounded staleness: the
        last one, where updates wait); of a REPLICATED row -1 if it was never trained; -1 of all others. Other
        rows are at home without a copy, or were never trained.
        """
        return self._tracker.states(self._tracker.placed() if rows is None else rows, self.iteration)

    def states_of(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> Arrays:
        """The same as `states` of those of these rows that are not simply at home, in the order given."""
        return self._tracker.states(self._tracker.placed_among(tables, keys), self.iteration)

    def go_on_at(self, iteration: int, next_record: int) -> None:
        """Before the first plan: continue the iteration and record numbers of an earlier scheduler."""
        if self.iteration > 0:
            raise ConfigError(f"a scheduler cannot start over: it has made {self.iteration} plans")
        self.iteration = self._first = iteration
        self._active.go_on_at(next_record)

    def mark_trained(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Before the first plan: mark rows as trained before; they are at home, and admitted.

        Tables that forget treat them as named in the iteration before, unless `recall` has said more.
        """
        self._check_beginning("rows can be marked as trained")
        rows = IdBatch(np.array([0, len(keys)]), tables, keys)
        self._check(rows)
        self._tracker.mark_trained(rows.tables, rows.keys, self.iteration)

    def recall(self, lifetimes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Before the first plan: restore the lifetimes that another scheduler, or one process, exported.

        Policies may differ: see `Lifetimes.restore`.
        """
        self._check_beginning("lifetimes can be restored")
        self._tracker.recall(Saved(lifetimes))

    def replicate(self, hot: HotRows) -> Replacement:
        """Between two plans: replicate these rows, and no others, from now on.

        The caller moves them: rows that enter are admitted, rows that leave are at home afterwards. See
        `rowhaul.runtime.hot_set`.
        """
        if self._failed or self.settings.sync_mode.name in ("bounded", "at-home"):
            raise ConfigError(
                "replicated rows cannot be replaced after planning has failed, nor with sync: bounded or "
                "at-home; use an exact mode with a plan such as on-demand"
            )
        replacement = self._tracker.replicate(hot, self.iteration)
        self.settings = replace(self.settings, hot=hot if len(hot) else None)
        return replacement

    def forget(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Between two plans: forget rows, which the caller drops; read on if the source had ended."""
        self._tracker.forget(tables, keys, self.iteration)
        self._exhausted = False

    def begin_at_home(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Between two plans: treat rows that nobody holds as trained; the caller makes them at home."""
        self._tracker.directory.mark_trained(tables, keys)

    def resize(self, sizes: RowSizes) -> None:
        """Between two plans, all rows at home and no batch in the window: change the sizes of rows.

        Reads on if the source had ended.
        """
        if self._window:
            raise ConfigError("sizes of rows cannot change while batches are in the window")
        self.settings = replace(self.settings, sizes=sizes)
        self._tracker.resize(sizes)
        self._dispatching.use(self.settings)
        self._exhausted = False

    def come_home(self) -> None:
        """Between two plans: treat all rows as at home, and all caches as empty.

        The caller has flushed them: see `rowhaul.pruning.scheduling`.
        """
        self._tracker.come_home(self.iteration)

    def export(self) -> Arrays:
        """Export all that decides later plans, besides settings and ids, as plain arrays: see `restore`.

        Call it between two plans; it may follow `fill`, and does not affect later plans.
        """
        if self._failed:
            raise DataError("planning has failed, so there is no state to export; make a new scheduler")
        window = b"".join(batch.ids.digest() for batch in self._window)
        return {
            "format": np.array([FORMAT]),
            "settings": text_array(json.dumps(self.settings.describe())),
            "window": np.frombuffer(window, np.uint8).copy(),
            "iteration": np.array([self.iteration]),
            "samples_planned": np.array([self._samples_planned]),
            **named("in_force", self._active.export()),
            **self._tracker.export(),
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from an exported state: the plans to come are the same, bit for bit.

        This scheduler must be new, with equal settings, and its batches must begin with the first one that
        was not planned then. The window is filled again from them.
        """
        if self.iteration > 0 or self._window or self._exhausted:
            raise ConfigError(
                "a state can only be restored before anything is read or planned; make a new scheduler"
            )
        saved = Saved(state)
        self._check_origin(saved)
        self._failed = True  # unless all goes well: half of a state may have been restored
        self.iteration, self._samples_planned = saved.number("iteration"), saved.number("samples_planned")
        self._tracker.restore(saved)
        self._active.restore(saved.part("in_force"))
        self._first = self.iteration
        self.fill()
        self._check_window(saved)
        self._failed = False

    def _add_to_window(self, ids: IdBatch) -> None:
        """Append a batch to the window, and link each row's use to the use before."""
        self._check(ids)
        number = self.iteration + len(self._window)
        batch, (named_by, place) = self._tracker.locate(number, ids, self.iteration)
        for earlier in self._window:
            link_uses(named_by, place, earlier.number, earlier.next_use, number)
        if not self._active.blind:
            _ = batch.by_sample  # here, where it delays no plan
        self._window.append(batch)

    def _check(self, batch: IdBatch) -> None:
        num_tables, given = len(self.settings.sizes.values), batch.by_feature
        if given is not None and given.is_simple and (given.tables < num_tables).all():
            return
        if len(batch.tables) and not 0 <= batch.tables.min() <= batch.tables.max() < num_tables:
            raise DataError(
                f"a batch names tables {batch.tables.min()} to {batch.tables.max()}, but sizes are given for "
                f"{num_tables} tables (0 to {num_tables - 1})"
            )

    def _check_beginning(self, what: str) -> None:
        if self.iteration > self._first:
            made = self.iteration - self._first
            raise ConfigError(f"{what} only before the first plan; {made} have been made")

    def _check_origin(self, saved: Saved) -> None:
        """Refuse a state that was exported with other settings."""
        if saved.number("format") != FORMAT:
            raise CheckpointError(
                f"the state of the scheduler has format {saved.number('format')}; this version reads {FORMAT}"
            )
        different = differences(self.settings.describe(), json.loads(saved.text("settings")))
        if different:
            raise CheckpointError(
                f"the state of the scheduler was saved with other settings ({'; '.join(different)}): "
                "use the settings of the checkpoint, or start without this state"
            )

    def _check_window(self, saved: Saved) -> None:
        """Refuse batches other than those that had been read ahead when the state was exported."""
        hashes = saved.array("window", np.uint8).tobytes()
        for number in range(len(hashes) // DIGEST_BYTES):
            expected = hashes[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if number >= len(self._window) or self._window[number].ids.digest() != expected:
                raise CheckpointError(
                    f"the batch of iteration {self.iteration + number} is not the one that was read before "
                    "the checkpoint: batches must continue after the last planned one, in the same order"
                )
