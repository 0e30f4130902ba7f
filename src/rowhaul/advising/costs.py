"""What a machine takes for a step, measured on this one: alone, and as a rank of a cluster.

Nothing is guessed from layers: `measure` trains the first batches of the data in this process, and again in
two real ranks that hold each other's rows, at two sizes of batch. Time is that of the processor, which other
programs on the machine disturb least.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rowhaul.cluster import launch
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.train.cluster_config import ONE_PROCESS, ClusterConfig
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.warm_up import compile_kernels
from rowhaul.train.trainer import Trainer

WARM_UP_STEPS, STEPS = 10, 20
RANKS = 2  # of the cluster that is tried
SMALLER = 4  # a second size of batch: this many times smaller

Progress = Callable[[str], None]
Step = TypeVar("Step")


@dataclass(frozen=True)
class Line:
    """Seconds as a function of samples: what a step takes whatever its size, and what each sample adds."""

    fixed: float
    per_sample: float

    def __call__(self, samples: float) -> float:
        """The seconds of a number of samples."""
        return self.fixed + self.per_sample * samples

    @classmethod
    def through(cls, seconds: Mapping[int, float]) -> Line:
        """The line through two measurements, by samples; never falling, and never below zero."""
        (small, first), (large, second) = sorted(seconds.items())
        slope = max((second - first) / (large - small), 0.0)
        fixed = max(first - slope * small, 0.0)
        return cls(fixed, slope if fixed else second / large)


@dataclass(frozen=True)
class Costs:
    """Processor seconds of a step on this machine.

    Args:
        alone: of one process that trains a whole batch.
        rank: of a rank, by the samples it trains, besides reading and planning.
        reading: of reading a sample; every machine reads the whole batch, to plan it.
        planning: how many times as long as by itself planning takes beside training, with which it shares
            the processor's caches.
        given: whether a person has given them, instead of measuring.
    """

    alone: Line
    rank: Line
    reading: float = 0.0
    planning: float = 1.0
    given: bool = False


def given(seconds_per_sample: float) -> Costs:
    """Costs given on the command line; ranks add nothing."""
    line = Line(0.0, seconds_per_sample)
    return Costs(line, line, given=True)


def measure(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    planning: Callable[[TrainConfig], float],
    progress: Progress = lambda text: None,
) -> Costs:
    """Train a little on this machine, alone and as two ranks.

    ``planning`` returns the processor seconds that planning a step takes by itself. One of the ranks plans
    and reads for both.
    """
    large = max(config.batch_size, 2)
    sizes = (max(large // SMALLER, 1), large)
    progress("training alone, to measure this machine")
    alone = {size: _alone(replace(config, batch_size=size), schema, data) for size in sizes}
    ranks = {}
    compile_kernels(_tried(config), schema, lambda: progress("compiling kernels, once"))
    for share in (max(large // (RANKS * SMALLER), 1), max(large // RANKS, 2)):
        progress(f"training as {RANKS} ranks, to measure this machine")
        tried = replace(_tried(config), batch_size=RANKS * share)
        every, planned, read = _of_all_ranks(tried, schema, data)
        ranks[share] = max(every - planned - read, 0.0) / RANKS
    return Costs(
        Line.through(alone),
        Line.through(ranks),
        reading=read / tried.batch_size,
        planning=max(planned / planning(tried), 1.0),
    )


def _tried(config: TrainConfig) -> TrainConfig:
    """The cluster that is tried: what rows cost a rank depends little on who sends them."""
    cluster = ClusterConfig(
        workers=RANKS,
        colocated=True,
        peer_to_peer=True,
        dispatcher="round-robin",
        sync="on-demand",
        cache=config.cluster.cache,
        compare_every=0,
    )
    return replace(config, cluster=cluster, threads=1)


def _alone(config: TrainConfig, schema: Schema, data: Any) -> float:
    """Seconds of a step on one machine: with its threads, or with one where others use the processor, too."""
    threads = {1, config.threads or torch.get_num_threads()}
    return min(_with_threads(replace(config, threads=one), schema, data) for one in threads)


def _with_threads(config: TrainConfig, schema: Schema, data: Any) -> float:
    config = replace(config, max_steps=WARM_UP_STEPS + STEPS, cluster=ONE_PROCESS)
    trainer, taken = Trainer(config, schema), []
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        for samples in islice(_stream(config, schema, data), WARM_UP_STEPS + STEPS):
            prepared = trainer.prepare(samples)  # beside training, in a thread of its own
            began = time.perf_counter(), time.thread_time()
            trainer.train_step(prepared)
            # With several threads only the clock on the wall counts them all once.
            taken.append(
                time.thread_time() - began[1]
                if torch.get_num_threads() == 1
                else time.perf_counter() - began[0]
            )
    finally:
        torch.set_num_threads(threads)
    return _typical(taken)


def _of_all_ranks(config: TrainConfig, schema: Schema, data: Any) -> tuple[float, float, float]:
    """Processor seconds that all ranks together spend on a step; of those, on planning, and on reading."""
    with tempfile.TemporaryDirectory(prefix="rowhaul-plan-") as name:
        folder = Path(name)
        config = replace(config, max_steps=WARM_UP_STEPS + STEPS, checkpoint_every=0)
        config.write(folder / "config.yaml")
        schema.write(folder / "schema.yaml")
        (folder / "data.json").write_text(json.dumps([str(one) for one in _files(data)]))
        script = [sys.executable, "-m", "rowhaul.advising.tried_rank"]
        launch([name], RANKS, colocated=True, command=script, environment={"OMP_NUM_THREADS": "1"})
        taken = np.load(folder / "seconds.npy")
        beside = np.sum([np.load(folder / f"beside-{rank}.npy") for rank in range(RANKS)], axis=0)
    # Files are read many samples at a time: few steps take most of it.
    planned, read = np.mean(_counted(beside.tolist()), axis=0).tolist()
    return _typical(taken.tolist()), planned, read


def _files(data: Any) -> list[Any]:
    return [data] if isinstance(data, str | Path) else list(data)


def _stream(config: TrainConfig, schema: Schema, data: Any) -> SampleStream:
    # Small data is read as often as it takes.
    return SampleStream(data, schema, config.batch_size, epochs=1 << 20)


def _typical(taken: list[float]) -> float:
    return float(np.median(_counted(taken)))


def _counted(steps: list[Step]) -> list[Step]:
    """Those after the warm-up; all of them where the data ends before."""
    return steps[WARM_UP_STEPS:] or steps
