"""`Session`: what the loop of a run trains, alone or in a cluster, and who listens to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rowhaul.checkpoint import Place
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.schedule.plan import RowCounts
from rowhaul.train.log import TrainingLog
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import ProgressiveValues, Scores
from rowhaul.train.trainer import Trainer

Saved = Callable[[Exception | None], None]
"""Called when a save has ended: with None when it is complete, or with the error."""

ShouldStop = Callable[[], bool]


class Listener(Protocol):
    """Follows a run, for a progress bar."""

    def started(self, samples: int, total_samples: int) -> None:
        """Training begins at ``samples`` of ``total_samples``; 0: of a stream, whose end is not known."""

    def stepped(self, samples: int, loss: float) -> None:
        """A step is done; ``samples`` counts all so far."""

    def evaluating(self, total_samples: int) -> None:
        """An evaluation begins."""

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        """An evaluation is done."""

    def scored(self, step: int, values: ProgressiveValues) -> None:
        """A window of progressive validation has ended."""

    def noted(self, text: str) -> None:
        """Something happened that a person should know."""

    def explained(self, detail: dict[str, Any]) -> None:
        """What the run has measured of itself so far; see `rowhaul.explain`."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    step: int
    steps_taken: int  # by this call; the others were taken before it resumed
    samples: int
    samples_per_second: float  # of training: without the first step, evaluations and checkpoints
    metrics: MetricValues | None
    interrupted: bool
    num_rows: int
    row_bytes: int  # values, optimizer state and index
    row_counts: RowCounts | None = None  # of this call, where policies admit and drop rows
    pruning: Any = None  # a report on what is left of rows, where they are pruned
    note: str = ""  # on the data, if there is something to say
    waits: str = ""  # which of reader and card waits, where there is a card
    inexact: str = ""  # why what was learned depends on the cluster, if it does
    one_machine: str = ""  # of a cluster: that one machine would be faster, if so
    stream_ended: bool = False  # nothing more came; otherwise steps, patience or somebody ended the run
    ended_early: bool = False  # for want of patience, in this call or before


class Session(Protocol):
    """Training alone or in a cluster, as the loop sees it.

    Attributes:
        trainer: the model, its optimizers and how far they have come.
        log: of the run.
        stream: the training data.
        evaluation: the evaluation data.
        is_leader: whether this process keeps checkpoints and the log of evaluations.
        contents_folder: where this process keeps digests of the training data that it reads; None: nowhere.
        first_note: what to note in the log at the start, if anything.
        stopped: whether the run was asked to stop.
        tell: notes something in the log, and to the listener; set by the loop.
        should_save: says whether the clock asks for a checkpoint; set by the loop, asked on the leader.
        save_due: whether `batches` has ended early for a checkpoint.
        should_publish: says whether the clock asks for a published version; set by the loop, asked on the
            leader.
        publish_due: whether `batches` has ended early for one.
        finished: whether the data is used up.
        hands_over: whether another session goes on from a checkpoint of this step.
        more_facts: what checkpoints say besides.
    """

    trainer: Trainer
    log: TrainingLog
    stream: SampleStream | LiveStream
    evaluation: SampleStream | None
    is_leader: bool = True
    contents_folder: Path | None = None
    first_note: str = ""
    stopped: bool = False
    tell: Callable[[str], None] = staticmethod(lambda text: None)
    should_save: Callable[[], bool] = staticmethod(lambda: False)
    save_due: bool = False
    should_publish: Callable[[], bool] = staticmethod(lambda: False)
    publish_due: bool = False
    finished: bool = False
    hands_over: bool = False
    more_facts: Mapping[str, Any] = MappingProxyType({})

    def start(self) -> None:
        """Prepare for the first step; the log is open."""
        return None

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield this process's part of the next global batches; fewer where the run ends, stops or saves."""

    def train(self, batch: Batch) -> float:
        """Take one step; returns the loss of the global batch."""

    def pauses(self) -> list[int]:
        """Steps at which `rest` must be called."""
        return []

    def rest(self, at_checkpoint: bool) -> None:
        """Do what can only be done between iterations."""
        return None

    @property
    def waits(self) -> str:
        """Which of reader and card waits for the other, in words; empty where that is not known."""
        return ""

    def evaluate(self) -> MetricValues:
        """Measure the model on the evaluation data."""

    def gather_scores(self, mine: Scores) -> Scores:
        """Gather on the leader what the forward passes of training gave to the samples of all processes."""
        return mine

    def save(self, checkpoints: Place, facts: dict[str, Any]) -> None:
        """Save a checkpoint of this step, once the one that is under way is complete."""

    def save_beside(self, checkpoints: Place, facts: dict[str, Any], done: Saved, *, waits: bool) -> bool:
        """Save a checkpoint of this step while training goes on; return whether that has begun.

        If one is under way it waits for that, or is left out. ``done`` is called in another thread when it is
        complete, or has failed.
        """

    def publish_beside(self, done: Saved, *, waits: bool) -> bool:
        """Publish what changed while training goes on; return whether that has begun.

        If a version is being written it waits for that, or is left out. ``done`` is called in another thread
        when this one can be read, or has failed.
        """
        return False

    def publish_last(self, done: Saved) -> None:
        """Publish the model at the end of a run, and wait until it can be read."""
        return None

    def num_rows(self) -> int | None:
        """Count the rows of the model; None where that would need other processes."""
        return None

    def held(self) -> tuple[int, int]:
        """Count rows, and bytes of rows and indexes."""

    def finish(self) -> None:
        """Log what is known only at the end."""
        return None
