"""One rank of `shares_auto`, or one process: trains as `rowhaul train` does; prints seconds of iterations."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.run import train_on_cluster
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import ProgressiveValues
from rowhaul.train.run import train_run


class Clock:
    """A listener that notes when each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def started(self, samples: int, total_samples: int) -> None:
        """Do nothing."""

    def stepped(self, samples: int, loss: float) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def evaluating(self, total_samples: int) -> None:
        """Do nothing."""

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        """Do nothing."""

    def scored(self, step: int, values: ProgressiveValues) -> None:
        """Do nothing."""

    def noted(self, text: str) -> None:
        """Do nothing."""


def main() -> None:
    """Train on the data given, with the configuration given."""
    data, out, config = sys.argv[1:]
    torch.set_num_threads(1)
    keep_freed_memory()
    switch_threads_sooner()
    clock, read = Clock(), TrainConfig.from_dict(json.loads(config))
    train = train_on_cluster if read.cluster.workers else train_run
    train(read, Schema.read(Path(data) / "schema.yaml"), data, out=out, listener=clock)
    pairs = zip(clock.times, clock.times[1:], strict=False)
    print(json.dumps([after - before for before, after in pairs]))


if __name__ == "__main__":
    main()
