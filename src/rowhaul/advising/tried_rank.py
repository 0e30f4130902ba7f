"""One of the two ranks that `rowhaul.advising.costs` starts: trains a little and counts processor time.

Argument: a folder with the configuration, the schema and the names of the files.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.data.schema import Schema
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.train import loop
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.run import join_as_configured
from rowhaul.train.distributed.session import ClusterSession

FOR_ALL = ("rowhaul-plann", "rowhaul-prefetch")  # threads that plan and read, on one rank of a host


class _CountedRun(ClusterSession):
    """The run that `rowhaul train` makes, with a note of the processor time of all ranks."""

    def __init__(self, *arguments: Any) -> None:
        self.measures: list[Any] = []
        self.beside: list[list[float]] = []  # seconds of this rank's threads of `FOR_ALL`, so far
        super().__init__(*arguments)

    def iterated(self, job: Job) -> None:
        super().iterated(job)
        self.beside.append([_seconds_of(name) for name in FOR_ALL])
        if job.measures is not None:
            self.measures.append(job.measures.copy())


def _seconds_of(name: str) -> float:
    """Processor seconds that this process's threads of a name have used so far."""
    idents = [one.ident for one in threading.enumerate() if one.name.startswith(name)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(one)) for one in idents if one is not None)


def seconds_of_all(measures: Any) -> Any:
    """Processor seconds of all ranks together in every iteration but the first."""
    every = np.stack(measures)  # iterations x ranks x measures
    return np.diff(every[:, :, MEASURES.index("cpu")], axis=0).sum(axis=1)


def main() -> None:
    """Train as one rank."""
    folder = Path(sys.argv[1])
    keep_freed_memory()
    switch_threads_sooner()
    config, schema = TrainConfig.read(folder / "config.yaml"), Schema.read(folder / "schema.yaml")
    data = json.loads((folder / "data.json").read_text())
    with join_as_configured(config.cluster) as cluster:
        run = _CountedRun(cluster, config, schema, data, None, None, False)
        try:
            loop.train(run, None, None)
        finally:
            run.close()
        np.save(folder / f"beside-{cluster.rank}.npy", np.diff(run.beside, axis=0))
        if cluster.rank == 0:
            np.save(folder / "seconds.npy", seconds_of_all(run.measures))


if __name__ == "__main__":
    main()
