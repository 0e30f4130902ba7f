"""FIITED's figure 10, redone: models take turns, batch by batch, so that other work disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from figures import plots
from figures.fiited import CHUNKS, QUICK_SAMPLES
from figures.published import FIITED as SAYS
from figures.sections import Section, Table, times
from pruning_methods.logs import SOURCES, folder_of, read_log
from pruning_methods.methods import FIITED, GROWING, MIXED, UNPRUNED, Case, MethodTrainer
from pruning_methods.runs import Run, config_of
from rowhaul.nn import Batch

RATIO = 0.9375
WARMUP = 20  # steps that are not timed
CASES = {
    "unpruned": Case(UNPRUNED),
    **{f"K = {chunks}": Case(FIITED, RATIO, chunks) for chunks in CHUNKS},
    "mixed dims": Case(MIXED, RATIO),
    "growing": Case(GROWING, RATIO),
}


def figure_10(quick: bool, out: Path) -> Section:
    """Processor time of training and of scoring."""
    run = Run("criteo", QUICK_SAMPLES if quick else SOURCES["criteo"].samples, 0, CASES["unpruned"])
    folder_of(run.data, run.samples, run.seed)
    log = read_log(run.data, run.samples, run.seed)
    config = config_of(run, log)
    models = {name: MethodTrainer(config, log, SOURCES["criteo"], case) for name, case in CASES.items()}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = in_turns({name: model.train_step for name, model in models.items()}, log.train, WARMUP)
        with torch.no_grad():
            for model in models.values():
                model.model.eval()
            scoring = in_turns({name: model.model for name, model in models.items()}, log.test, 1)
    finally:
        torch.set_num_threads(threads)
    names = list(CASES)[1:]
    series = {
        kind: [seconds[name] / seconds["unpruned"] for name in names]
        for kind, seconds in (("training", training), ("scoring", scoring))
    }
    at = dict(zip(names, series["training"], strict=True))
    panel = plots.Panel(
        "FIITED, figure 10a: processor time, unpruned = 1", names, series, ylabel="of unpruned"
    )
    return Section(
        "fiited-10",
        "FIITED, figure 10: the time of an iteration",
        "CPU time of an iteration relative to the unpruned model, median, 93.75 % pruned; K = 1 is AdaEmbed. "
        f"The Criteo-like log, {len(log.train):,} batches of {SOURCES['criteo'].batch_size:,} on one core "
        "(the paper: 4,096 on one GPU); batches of scoring have 8,192 samples.",
        [Table(["", *names], [[kind, *(f"{one:.2f}" for one in values)] for kind, values in series.items()])],
        [
            (SAYS["speed"], f"K = 2 {times(1 / at['K = 2'])}, K = 4 {times(1 / at['K = 4'])}"),
            (SAYS["chunks cost"], ", ".join(f"K = {chunks} {at[f'K = {chunks}']:.2f}" for chunks in CHUNKS)),
        ],
        plots=[plots.save(out / "fiited-10.png", [panel])],
    )


def in_turns(
    work: Mapping[str, Callable[[Batch], object]], batches: Sequence[Batch], warmup: int
) -> dict[str, float]:
    """Median CPU seconds for a batch of everything that is to be done with it, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for batch in batches:
        for name, step in work.items():
            began = time.process_time()
            step(batch)
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(values[warmup:]) for name, values in seconds.items()}
