"""`rowhaul size`: how much memory a run will need, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul.cli.checks import refuse_unused
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar
from rowhaul.cli.run import RunOptions, with_run_options
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from rowhaul.data.samples import Samples
    from rowhaul.data.schema import Schema
    from rowhaul.sizing.model import ModelSize
    from rowhaul.sizing.row_counts import RowCounts
    from rowhaul.sizing.sizing import Run
    from rowhaul.train import TrainConfig

EXIT_TOO_LARGE = 1


@with_run_options
def size(
    options: RunOptions,
    sample: int | None = typer.Option(
        None, help="Read only this many samples, from the first on, and extrapolate; default: all."
    ),
    machines: int | None = typer.Option(None, help="Machines that the ranks are spread over; default: one."),
    memory: str | None = typer.Option(
        None, help="Memory of a machine, such as 16GiB; default: that of this one."
    ),
    budgets: str | None = typer.Option(
        None, help="Train short probes within these budgets, such as 4MiB,16MiB, and compare them."
    ),
    probe_steps: int | None = typer.Option(None, help="With --budgets: steps of each probe (default 300)."),
    eval_data: list[str] = typer.Option(
        [], help="With --budgets: what probes are scored on; default: test/ beside the data."
    ),
    plot: Path | None = typer.Option(
        None, help="With --budgets: draw the probes' AUC against memory here, as .png."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Estimate the memory of each table and each worker; exits with 1 if it does not fit."""
    if budgets is not None:
        from rowhaul.cli.size.budgets import PROBE_STEPS, try_budgets

        estimating = {"--sample": sample, "--machines": machines, "--memory": memory}
        refuse_unused(
            estimating, "is for the estimate, which is not made with --budgets; leave out one of them"
        )
        steps = PROBE_STEPS if probe_steps is None else probe_steps
        try_budgets(options, budgets, steps, eval_data, plot, as_json=as_json)
        return
    probing = {"--probe-steps": probe_steps, "--eval-data": eval_data, "--plot": plot}
    refuse_unused(probing, "is for probes; add --budgets, such as 4MiB,16MiB, or leave it out")
    machines = 1 if machines is None else machines
    from rowhaul.cli.size.report import does_fit, numbers, print_report
    from rowhaul.sizing.fit import suggestions

    config = options.read_config()
    _check(config, machines, sample)
    available = machine_memory(memory)
    schema = options.find_schema(require_label=False)
    counts = _count(options.data, schema, config, sample)
    run, model_of = describe_run(config, schema, options.data, counts, machines)
    run.check()
    estimate = run.estimate()
    is_enough = estimate.needed <= available
    ways = [] if is_enough else list(suggestions(run, available, model_of))
    if as_json:
        print_json(numbers(run, counts, estimate, available, ways))
    else:
        print_report(run, counts, estimate, available, ways)
    if not does_fit(estimate, available):
        raise typer.Exit(EXIT_TOO_LARGE)


def machine_memory(given: str | None) -> int:
    """Bytes of memory of a machine: as given, or this one's, or what its container grants."""
    import psutil

    from rowhaul._quantities import parse_bytes
    from rowhaul.cli.doctor.machine import container_memory_limit

    if given is not None:
        asked = parse_bytes(given, "--memory")
        if not asked:
            raise ConfigError(f"--memory {given}: a machine needs memory; write 16GiB, for example")
        return asked
    total = int(psutil.virtual_memory().total)
    limit = container_memory_limit()
    return total if limit is None else min(total, limit)


def _check(config: TrainConfig, machines: int, sample: int | None) -> None:
    if sample is not None and sample < 2:
        raise ConfigError(f"--sample is {sample}; it must be at least 2 samples")
    ranks = config.cluster.topology().num_ranks if config.cluster.workers else 1
    if not 1 <= machines <= ranks:
        raise ConfigError(
            f"--machines is {machines}, but there are {ranks} ranks to put on them; every machine needs at "
            "least one (--workers, --stores)"
        )


def _count(data: list[str], schema: Schema, config: TrainConfig, sample: int | None) -> RowCounts:
    from rowhaul.sizing.row_counts import count_rows

    limit = config.max_steps * config.batch_size or None
    interrupted = "the rows were not all counted; --sample reads fewer samples"
    with progress_bar("counting rows", interrupted) as progress:
        return count_rows(data, schema, limit=limit, sample=sample, progress=progress)


def describe_run(
    config: TrainConfig, schema: Schema, data: Any, counts: RowCounts, machines: int = 1
) -> tuple[Run, Any]:
    """The run to estimate, and a function that measures its model with another embedding size."""
    import gc
    from dataclasses import replace

    import numpy as np
    import psutil

    from rowhaul.data.stream import SampleStream
    from rowhaul.sizing.model import TRIED_SAMPLES, measure_model
    from rowhaul.sizing.sizing import Run

    size = max(config.batch_size, TRIED_SAMPLES)
    batch = next(iter(SampleStream(data, schema, size, limit=size, require_label=False)))
    samples = batch.take(np.arange(min(TRIED_SAMPLES, len(batch))))

    def model_of(dim: int) -> ModelSize:
        return measure_model(replace(config, model=replace(config.model, embedding_dim=dim)), schema, samples)

    model = model_of(config.model.embedding_dim)
    gc.collect()
    process = int(psutil.Process().memory_info().rss)
    run = Run(
        config,
        schema,
        counts.rows,
        counts.ids_per_sample,
        model,
        process,
        machines,
        counts.table_ids_per_sample,
        counts.samples,
        _distinct_rows(batch.take(np.arange(min(config.batch_size, len(batch)))), schema),
    )
    return run, model_of


def _distinct_rows(batch: Samples, schema: Schema) -> int:
    """How many different rows a batch reads."""
    import numpy as np

    keys = dict(zip(batch.features, batch.ids_of_features(), strict=True))
    return sum(
        len(np.unique(np.concatenate([keys[name] for name in features])))
        for features in schema.tables.values()
    )
