"""One machine goes on alone, where `--shares auto` finds that it is the quickest.

A worker that trains every sample of a cluster still plans, agrees and looks for rows of others: up to three
times the work of a single process. So the cluster saves a checkpoint, and rank 0 resumes it as a single
process would. The others stay joined and wait: rank 0 measures links with them now and then. The cluster goes
on from the last checkpoint of the single process once a link has changed, or rank 0's memory gets short.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from rowhaul._activity import progressed
from rowhaul._cores import usable_cores
from rowhaul._quantities import bytes_text
from rowhaul.cluster.checks import gather_texts
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import FOREVER
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.session import RunResult, ShouldStop
from rowhaul.tuning.shares import CHANGED_LINK, MeasuredLinks, ShareController, seconds_between_checks

ROOM = 2.0  # times the rows so far that must be free: they grow, and loading them takes memory, too
SCARCE = 0.1  # of the memory free: the cluster goes on
_LOOK_SECONDS = 1.0  # between two looks at the memory
_LINKS, _BACK, _END = "measure links", "back", "end"  # what rank 0 says to the others

Train = Callable[[ShouldStop], RunResult]


def is_possible(config: TrainConfig) -> bool:
    """Whether a run can go on in one process; otherwise one machine stays in the cluster.

    Publishing and `--explain` stay with the ranks they began with, and a card may not hold all rows.
    """
    return config.device == "cpu" and not (config.publish.is_used or config.monitoring.explain)


def is_chosen(
    cluster: Cluster, training: DistributedTraining, shares: ShareController, tell: Callable[[str], None]
) -> bool:
    """Decide on all ranks alike whether rank 0 goes on alone; a collective call between two segments."""
    home = training.runtime.mover.home
    row_bytes = sum(group.allocated_bytes for group in home.groups) if home is not None else 0
    wanted = cluster.rank == 0 and shares.wants_alone
    mine = {"wanted": wanted, "bytes": row_bytes, "free": psutil.virtual_memory().available}
    every = [json.loads(one) for one in gather_texts(cluster, "deciding who goes on", json.dumps(mine))]
    needed, free = int(ROOM * sum(one["bytes"] for one in every)), every[0]["free"]
    if not every[0]["wanted"]:
        return False
    if needed > free:
        shares.may_go_alone = False  # and is not asked again
        tell(
            "one machine is the quickest, but stays in the cluster: all rows with room to grow take "
            f"{bytes_text(needed)}, and rank 0's host has {bytes_text(free)} free"
        )
        return False
    tell(
        f"one machine is the quickest: rank 0 goes on alone from step {training.iteration:,}; the others "
        "wait, and train again when links change"
    )
    return True


@dataclass(frozen=True)
class Outcome:
    """How training alone has ended: with a result, and why the cluster goes on, if it does."""

    result: RunResult
    back: str = ""
    has_room: bool = True  # for rank 0 to go on alone once more


def train_alone(
    cluster: Cluster, links: MeasuredLinks, before: RunResult, should_stop: ShouldStop, train: Train
) -> Outcome:
    """Train on rank 0 alone, while the others wait; a collective call.

    Args:
        cluster: of this rank.
        links: as measured before, with which later measurements are compared.
        before: the result of the cluster.
        should_stop: asked on rank 0 after every step.
        train: resumes the run in this process; called on rank 0.
    """
    if cluster.rank:
        return _wait(cluster, before)
    lookout = _Lookout(cluster, links, should_stop)
    with threads_of_host(cluster):
        result = train(lookout.should_stop)
    back = lookout.reason if result.interrupted else ""
    facts = {name: getattr(result, name) for name in ("step", "samples", "interrupted")}
    _say(cluster, _BACK if back else _END, reason=back, has_room=lookout.has_room, result=facts)
    return Outcome(result, back, lookout.has_room)


def _wait(cluster: Cluster, before: RunResult) -> Outcome:
    """Do what rank 0 says, until it has ended."""
    while (said := _hear(cluster))["word"] == _LINKS:
        MeasuredLinks.measure(cluster)
    return Outcome(replace(before, **said["result"]), said["reason"], said["has_room"])


def _say(cluster: Cluster, word: str, **more: Any) -> None:
    gather_texts(cluster, "training alone", json.dumps({"word": word, **more}), FOREVER)


def _hear(cluster: Cluster) -> dict[str, Any]:
    return dict(json.loads(gather_texts(cluster, "training alone", "", FOREVER)[0]))


class _Lookout:
    """Looks at links and memory while rank 0 trains alone.

    Attributes:
        reason: why the cluster should go on; empty: it should not.
        has_room: whether rank 0's memory holds the rows.
    """

    def __init__(self, cluster: Cluster, links: MeasuredLinks, should_stop: ShouldStop) -> None:
        self._cluster, self._links, self._should_stop = cluster, links, should_stop
        self._looked_at = self._measured_at = time.monotonic()
        self._measuring = 0.0  # seconds, the last time
        self.reason, self.has_room = "", True

    def should_stop(self) -> bool:
        """Whether the user stops the run, or the cluster should go on; asked after every step."""
        progressed()  # the others wait, but nothing is stuck
        if self._should_stop() or self.reason:
            return True
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._cluster.failure.check()
            self._look_at_memory()
            if not self.reason and now - self._measured_at > seconds_between_checks(self._measuring):
                self._look_at_links()
        return bool(self.reason)

    def _look_at_memory(self) -> None:
        memory = psutil.virtual_memory()
        if memory.available < SCARCE * memory.total:
            self.has_room = False
            self.reason = f"rank 0's host has only {bytes_text(memory.available)} of memory left"

    def _look_at_links(self) -> None:
        _say(self._cluster, _LINKS)
        began = time.monotonic()
        changed = MeasuredLinks.measure(self._cluster).largest_change(self._links)
        self._measured_at = time.monotonic()
        self._measuring = self._measured_at - began
        if changed >= CHANGED_LINK:
            self.reason = f"the speed of a link has changed {changed:.2f} times"


@contextmanager
def threads_of_host(cluster: Cluster) -> Iterator[None]:
    """Compute with the threads of all ranks of this host, which wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, min(before * len(cluster.local_ranks), usable_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(before)
