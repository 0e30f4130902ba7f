"""`Yardstick`: whether one machine alone would be faster than a cluster was.

What a cluster's user wants to know first is told early in a run and after it, and costs nothing to measure.
`--explain` says more, `rowhaul plan` says it beforehand, and `--shares auto` acts on it.
"""

from __future__ import annotations

from rowhaul._quantities import seconds_text
from rowhaul.cluster import Cluster
from rowhaul.runtime.mover import Job
from rowhaul.train.config import TrainConfig
from rowhaul.train.log import TrainingLog
from rowhaul.tuning.shares.controller import ALONE

_STARTING_STEPS = 10  # which may compile kernels
_TELLING_STEPS = 100  # until there is something to tell
_WORTH_SAYING = 0.95  # of what a step took


class Yardstick:
    """Compares a run with one machine, by what rank 0 takes to compute its samples.

    Args:
        cluster: the ranks, and their hosts.
        config: of the run.
        log: knows what its steps take.
    """

    def __init__(self, cluster: Cluster, config: TrainConfig, log: TrainingLog) -> None:
        self._num_workers = cluster.topology.num_workers
        self._share_a_machine = len(cluster.hosts) == 1
        self._batch_size, self._log = config.batch_size, log
        # With cards several on a machine are a gain; and who chooses shares automatically has tried it.
        self._says_nothing = (
            config.device != "cpu" or config.cluster.shares == "auto" or self._num_workers < 2
        )
        self._num_steps = 0
        self._timed_before = (0.0, 0)  # by the log, until the steps that count
        self._compute, self._samples = 0.0, 0  # of this rank since then
        self._reading = 0.0  # seconds that planning has waited for data since then

    def observe(self, job: Job) -> None:
        """Count an iteration that is over on this rank; the log may not know it yet."""
        self._num_steps += 1
        if self._num_steps == _STARTING_STEPS + 1:
            self._timed_before = self._log.timed
        elif self._num_steps > _STARTING_STEPS + 1:
            self._compute += job.seconds["compute"]
            self._samples += job.num_samples
            self._reading += job.seconds["reading"]

    def news(self) -> str:
        """Return `advice` once, as soon as there can be any; otherwise nothing."""
        is_due = self._num_steps == (1 if self._share_a_machine else _TELLING_STEPS)
        return self.advice() if is_due else ""

    def advice(self) -> str:
        """Say in words that one machine is faster; empty where that is not sure."""
        if self._says_nothing:
            return ""
        if self._share_a_machine:
            return (
                "usually faster here: one process, without --workers, uses the same cores and has nothing to "
                "plan or to move"
            )
        seconds = self._log.timed[0] - self._timed_before[0]
        samples = self._log.timed[1] - self._timed_before[1]
        if not (self._samples and samples):
            return ""
        together = seconds / samples * self._batch_size
        # Rather too much: a large batch takes less a sample than a part of it, and nothing moves beside it.
        # It reads the same data, at best no faster than they arrive here.
        num_steps = self._num_steps - _STARTING_STEPS - 1
        alone = ALONE * self._compute / self._samples * self._batch_size + self._reading / num_steps
        if alone >= _WORTH_SAYING * together:
            return ""
        return (
            f"faster: at most {seconds_text(alone)} a step alone, these {self._num_workers} workers took "
            f"{seconds_text(together)}; stay with one while the rows fit in its memory, or let --shares auto "
            "choose (rowhaul plan compares them beforehand)"
        )
