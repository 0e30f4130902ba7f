"""Single runs: train a case, score it, keep the result in a file so that nothing is computed twice."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from pruning_methods.logs import LOGS, SOURCES, Log, folder_of, read_log
from pruning_methods.methods import (
    DENSE_RATE,
    Case,
    MethodTrainer,
    held_bytes,
    use_one_thread,
    value_bytes,
)
from pruning_methods.sampler import Sampler
from rowhaul._files import write_text
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.train import TrainConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig
from rowhaul.train.metrics import BinaryMetrics, MetricValues

FOLDER = Path(__file__).parent.parent / "results" / "pruning"
_VERSION = 2  # of results: another number when what a run does changes


@dataclass(frozen=True)
class Run:
    """A case on a data set with a seed, which is that of the generated log, too."""

    data: str
    samples: int
    seed: int
    case: Case

    @property
    def path(self) -> Path:
        """Where its result is kept."""
        what = [_VERSION, LOGS, asdict(SOURCES[self.data]), DENSE_RATE, asdict(self)]
        text = json.dumps(what, sort_keys=True)
        return FOLDER / f"{self.data}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class Result:
    """What came of it; bytes are as allocated at the end, but for the peak."""

    auc: float
    log_loss: float
    accuracy: float
    num_rows: int
    value_bytes: int
    held_bytes: int
    peak_bytes: int
    num_looks: int
    train_seconds: float  # CPU seconds an iteration
    score_seconds: float  # CPU seconds for a thousand samples
    evicted: int
    allocated: int
    chunks_read: int
    ids_read: int


def config_of(run: Run) -> TrainConfig:
    """The same for every method."""
    source = SOURCES[run.data]
    return TrainConfig(
        model=ModelConfig("dlrm", source.dim, {"bottom": [64], "top": [64]}),
        rows=OptimizerConfig("rowwise_adagrad", source.row_rate),
        dense=OptimizerConfig("Adam", DENSE_RATE),
        batch_size=source.batch_size,
        seed=run.seed,
        on_unknown="default",
    )


def train(run: Run, log: Log) -> Result:
    """Train and score one run."""
    trainer = MethodTrainer(config_of(run), log, SOURCES[run.data], run.case)
    source = getattr(trainer.collection, "source", None)
    sampler = Sampler(source if isinstance(source, PrunedRows) else None)
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


def known_result(run: Run) -> Result | None:
    """What an earlier run left."""
    if not run.path.exists():
        return None
    kept: dict[str, Any] = json.loads(run.path.read_text(encoding="utf-8"))
    return Result(**kept["result"])


def results_of(
    runs: Iterable[Run], jobs: int, progress: Callable[[int, int, Run, Result], None]
) -> dict[Run, Result]:
    """All results, those that are missing computed in ``jobs`` processes; ended early, it goes on later."""
    runs = list(dict.fromkeys(runs))
    results = {run: known for run in runs if (known := known_result(run)) is not None}
    missing = [run for run in runs if run not in results]
    FOLDER.mkdir(parents=True, exist_ok=True)
    batches: dict[tuple[str, int, int], list[Run]] = {}
    for run in missing:  # what uses the same log stays together
        batches.setdefault((run.data, run.samples, run.seed), []).append(run)
    for log in batches:
        folder_of(*log)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=use_one_thread) as pool:
        parts = [part for some in batches.values() for part in _parts(some)]
        for done in as_completed([pool.submit(_train_and_keep, part) for part in parts]):
            for run, result in done.result():
                results[run] = result
                progress(len(results), len(runs), run, result)
    return {run: results[run] for run in runs}


def _parts(runs: Sequence[Run], size: int = 6) -> list[Sequence[Run]]:
    return [runs[first : first + size] for first in range(0, len(runs), size)]


def _train_and_keep(runs: Sequence[Run]) -> list[tuple[Run, Result]]:
    done = []
    for run in runs:
        result = train(run, read_log(run.data, run.samples, run.seed))
        write_text(run.path, json.dumps({"run": asdict(run), "result": asdict(result)}, indent=1))
        done.append((run, result))
    return done
