"""Asks the dispatcher in force who trains which sample, and checks its answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.active_controls import ActiveControls
from rowhaul.schedule.apportion import apportion
from rowhaul.schedule.directory import Directory, LocatedBatch
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import trainers_of
from rowhaul.schedule.settings import ScheduleSettings
from rowhaul.schedule.tasks import TaskBuilder, blind_task

SEEDS = 1 << 62  # kernels take a seed as a signed 64-bit integer


class Dispatching:
    """From a batch and the directory to an assignment."""

    def __init__(self, settings: ScheduleSettings, directory: Directory, active: ActiveControls) -> None:
        self._settings = settings
        self._directory = directory
        self._active = active
        self._tasks = TaskBuilder(settings.topology, settings.sizes)

    def use(self, settings: ScheduleSettings) -> None:
        """Go on with other sizes of rows."""
        self._settings = settings
        self._tasks = TaskBuilder(settings.topology, settings.sizes)

    def learn(self, iteration: int, samples_planned: int) -> None:
        """Let a dispatcher that learns do so, if this iteration is one in which it does."""
        learner = self._active.learner
        if learner is None or not learner.learns_at(iteration):
            return
        slots = self._directory.slots
        cached = np.flatnonzero(slots["head"] >= 0)
        samples_per_worker = samples_planned // self._settings.topology.num_workers
        appearances = self._directory.appearances[cached]
        self._active.use(learner.learn(slots["table"][cached], appearances, samples_per_worker))

    def assign(self, batch: LocatedBatch, following: LocatedBatch | None) -> npt.NDArray[np.int32]:
        """The worker of each sample; ``following`` is the next batch, if the window has it."""
        task = self._task(batch)
        far_sighted = self._active.far_sighted
        if far_sighted is None:
            worker = self._active.dispatcher.assign(task)
        else:
            worker = far_sighted.assign_ahead(
                task, lambda one: None if following is None else self._task_after(batch, task, one, following)
            )
        samples = np.bincount(worker, minlength=task.num_workers) if len(worker) else task.capacities * 0
        fits = len(samples) == task.num_workers and bool((samples <= task.capacities).all())
        if len(worker) != task.num_samples or not fits:  # kernels would write beyond their arrays
            raise ConfigError(
                f"the dispatcher {self._active.dispatcher.name} gave the workers {samples.tolist()} "
                f"samples of a batch of {task.num_samples}; their capacities are {task.capacities.tolist()}"
            )
        return worker

    def _task(self, batch: LocatedBatch) -> DispatchTask:
        capacities = apportion(batch.num_samples, self._active.shares)
        seed = (self._settings.seed * 0x9E3779B1 + batch.number) % SEEDS
        if self._active.blind:
            return blind_task(batch, self._active.prices, capacities, seed)
        return self._tasks.build(self._directory, batch, self._active.prices, capacities, seed)

    def _task_after(
        self, batch: LocatedBatch, task: DispatchTask, worker: npt.NDArray[np.int32], following: LocatedBatch
    ) -> DispatchTask:
        """The task of the next batch as if this one were trained so; evictions and admissions aside."""
        place = np.empty(len(self._directory.slots), np.int32)
        place[following.slots] = np.arange(len(following.slots), dtype=np.int32)
        shared = np.flatnonzero(batch.next_use == following.number)
        trainers = trainers_of(batch.offsets, batch.rows, worker, len(batch.slots))
        return self._tasks.after(
            task,
            trainers,
            self._directory.slots["state"][batch.slots],
            self._settings.sync_mode,
            self._task(following),
            shared,
            place[batch.slots[shared]],
        )
