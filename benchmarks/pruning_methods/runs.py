"""Single runs: train a case, score it, keep the result in a file so that nothing is computed twice."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from pruning_methods.logs import LOGS, SOURCES, Log, folder_of, read_log
from pruning_methods.methods import (
    BUDGET,
    DENSE_RATE,
    HASHING,
    UNIFORM,
    UNPRUNED,
    Case,
    MethodTrainer,
    held_bytes,
    use_one_thread,
    used_bytes,
    value_bytes,
)
from pruning_methods.sampler import BudgetExceededError, Sampler
from rowhaul._files import write_text
from rowhaul.errors import ConfigError
from rowhaul.pruning.config import PruneConfig
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.train import TrainConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig
from rowhaul.train.first_sums import STEPS
from rowhaul.train.fitting import Reads, fitted_to
from rowhaul.train.metrics import BinaryMetrics, MetricValues

FOLDER = Path(__file__).parent.parent / "results" / "memory"
_VERSION = 3  # of results: another number when what a run does changes

Progress = Callable[[int, int, "Run", "Result"], None]
"""Called with the runs done, all there are, and the one that is new."""


@dataclass(frozen=True)
class Run:
    """A case on a data set with a seed, which is that of the generated log, too."""

    data: str
    samples: int
    seed: int
    case: Case

    @property
    def unpruned(self) -> Run:
        """The run whose bytes are all that a share is of."""
        return replace(self, case=Case(UNPRUNED))

    @property
    def path(self) -> Path:
        """Where its result is kept."""
        what = [_VERSION, LOGS, asdict(SOURCES[self.data]), DENSE_RATE, asdict(self)]
        text = json.dumps(what, sort_keys=True)
        return FOLDER / f"{self.data}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Result:
    """What came of it; bytes are those at the end, but for the peak, and as allocated, but for those used."""

    auc: float
    log_loss: float
    accuracy: float
    num_rows: int
    value_bytes: int
    held_bytes: int
    used_bytes: int
    peak_bytes: int
    num_looks: int
    train_seconds: float  # CPU seconds an iteration
    score_seconds: float  # CPU seconds for a thousand samples
    evicted: int
    allocated: int
    chunks_read: int
    ids_read: int
    refused: str = ""  # why there is no result: the method cannot do with so few bytes

    @classmethod
    def refusal(cls, reason: str) -> Result:
        """Of a run that could not be."""
        numbers = {one.name: math.nan if one.type == "float" else 0 for one in fields(cls)}
        return cls(**{**numbers, "refused": reason})


def config_of(run: Run, log: Log, budget: int = 0) -> TrainConfig:
    """The same for every method, but for the size of rows and Rowhaul's own budget."""
    source, case = SOURCES[run.data], run.case
    narrow = case.dim if case.method in (UNIFORM, HASHING) else 0
    prune = PruneConfig(budget=f"{budget}b") if case.method == BUDGET else PruneConfig()
    config = TrainConfig(
        model=ModelConfig("dlrm", narrow or source.dim, {"bottom": [64], "top": [64]}),
        prune=prune,
        rows=OptimizerConfig("rowwise_adagrad", source.row_rate),
        dense=OptimizerConfig("Adam", DENSE_RATE),
        batch_size=source.batch_size,
        seed=run.seed,
        on_unknown="default",
    )
    if case.method != BUDGET:
        return config
    # As `rowhaul train --memory-budget` does.
    reads = Reads(log.counts, 1.0, log.num_samples)
    return fitted_to(config, log.schema, reads, choose_dim=True, first=log.train[:STEPS]).config


def train(run: Run, log: Log) -> Result:
    """Train and score one run."""
    budget = budget_of(run)
    trainer = MethodTrainer(config_of(run, log, budget), log, SOURCES[run.data], run.case, budget)
    source = getattr(trainer.collection, "source", None)
    most = budget if run.case.method == BUDGET else 0
    sampler = Sampler(source if isinstance(source, PrunedRows) else None, most)
    seconds = 0.0
    for batch in log.train:
        began = time.process_time()
        trainer.train_step(batch)
        seconds += time.process_time() - began
        sampler.look(held_bytes(trainer), batch)
    began = time.process_time()
    metrics = score(trainer, log)
    score_seconds = time.process_time() - began
    return Result(
        auc=metrics.auc,
        log_loss=metrics.log_loss,
        accuracy=metrics.accuracy,
        num_rows=int(log.num_rows.sum()),
        value_bytes=value_bytes(trainer),
        held_bytes=held_bytes(trainer),
        used_bytes=used_bytes(trainer),
        peak_bytes=sampler.peak_bytes,
        num_looks=sampler.num_looks,
        train_seconds=seconds / len(log.train),
        score_seconds=1000 * score_seconds / sum(map(len, log.test)),
        evicted=sampler.evicted,
        allocated=sampler.allocated,
        chunks_read=sampler.chunks_read,
        ids_read=sampler.ids_read,
    )


def score(trainer: MethodTrainer, log: Log) -> MetricValues:
    """Metrics of the samples that were held out."""
    metrics = BinaryMetrics()
    trainer.model.eval()
    with torch.no_grad():
        for batch in log.test:
            assert batch.labels is not None
            metrics.update(batch.labels, trainer.model(batch))
    return metrics.compute()


def budget_of(run: Run) -> int:
    """Bytes that a run may take; 0: whatever its method takes."""
    if not run.case.share:
        return 0
    unpruned = known_result(run.unpruned)
    if unpruned is None:
        raise ValueError(f"{run}: its budget is a share of what the unpruned run takes; run that first")
    return int(run.case.share * unpruned.used_bytes)


def known_result(run: Run) -> Result | None:
    """What an earlier run left."""
    if not run.path.exists():
        return None
    kept: dict[str, Any] = json.loads(run.path.read_text(encoding="utf-8"))
    return Result(**kept["result"])


def results_of(
    runs: Iterable[Run], jobs: int, progress: Progress, deadline: float = math.inf
) -> dict[Run, Result]:
    """All results, those that are missing computed in ``jobs`` processes; ended early, it goes on later.

    No run begins after the ``deadline`` (of `time.monotonic`); those without a result are left out then.
    """
    runs = list(dict.fromkeys(runs))
    needed = list(dict.fromkeys([run.unpruned for run in runs if run.case.share] + runs))
    results = {run: known for run in needed if (known := known_result(run)) is not None}
    missing = [run for run in needed if run not in results]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for log in dict.fromkeys((run.data, run.samples, run.seed) for run in missing):
        if time.monotonic() < deadline:
            folder_of(*log)
    # A budget is a share of what the unpruned run takes, so those come first.
    waves = [[run for run in missing if bool(run.case.share) is later] for later in (False, True)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=use_one_thread) as pool:
        for wave in waves:
            for run, result in _computed(pool, wave, jobs, deadline):
                results[run] = result
                progress(len(results), len(needed), run, result)
    return {run: results[run] for run in runs if run in results}


def _computed(
    pool: ProcessPoolExecutor, runs: Sequence[Run], jobs: int, deadline: float
) -> Iterator[tuple[Run, Result]]:
    """Yield results as they come; runs that use the same log are side by side, and each process keeps one."""
    waiting, running = deque(runs), set()
    while True:
        while waiting and len(running) < jobs and time.monotonic() < deadline:
            running.add(pool.submit(train_and_keep, waiting.popleft()))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            yield one.result()


def train_and_keep(run: Run) -> tuple[Run, Result]:
    """Train a run and write its result."""
    try:
        result = train(run, read_log(run.data, run.samples, run.seed))
    except (ConfigError, BudgetExceededError) as error:
        result = Result.refusal(str(error))
    write_text(run.path, json.dumps({"run": asdict(run), "result": asdict(result)}, indent=1))
    return run, result
