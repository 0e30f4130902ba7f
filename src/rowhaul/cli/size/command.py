"""`rowhaul size`: how much memory a run will need, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rowhaul.data.samples import Samples
    from rowhaul.data.schema import Schema
    from rowhaul.sizing.model import ModelSize
    from rowhaul.sizing.row_counts import RowCounts
    from rowhaul.sizing.sizing import Run
    from rowhaul.train import TrainConfig

EXIT_TOO_LARGE = 1


def size(
    config: Path | None = typer.Argument(None, help="YAML or TOML settings, as for `train`."),
    data: list[str] = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable."),
    schema: Path | None = typer.Option(
        None, "--schema", help="Schema file; default: schema.yaml beside the data."
    ),
    features: str | None = typer.Option(
        None, "--features", help="Id columns, comma-separated, of data without a schema."
    ),
    sample: int | None = typer.Option(
        None, help="Read the first so many samples only, and extrapolate; default: all of them."
    ),
    model: str | None = typer.Option(None, help="wide_deep, deepfm, dcn, dlrm, ncf or legacy."),
    embedding_dim: int | None = typer.Option(None, help="Values in an embedding."),
    row_optimizer: str | None = typer.Option(None, help="sgd, adagrad, rowwise_adagrad or adam."),
    batch_size: int | None = typer.Option(None, help="Samples in the global batch."),
    workers: int | None = typer.Option(None, help="Ranks that train."),
    stores: int | None = typer.Option(None, help="Ranks that only hold rows."),
    colocated: bool | None = typer.Option(None, "--colocated", help="Workers store the rows themselves."),
    cache: str | None = typer.Option(None, help="What a worker may hold: rows, or bytes such as 512MiB."),
    hot: str | None = typer.Option(
        None, "--hot", help="Hot rows that every worker holds, or auto: as many as it may choose."
    ),
    prune: str | None = typer.Option(None, "--prune", help="Prune this share of the values, such as 90%."),
    memory_budget: str | None = typer.Option(
        None, "--memory-budget", help="Prune to this much memory for rows, such as 2GiB."
    ),
    admit_after: int | None = typer.Option(None, help="Sightings with which a row is admitted."),
    ttl: int | None = typer.Option(None, help="Iterations after which a row that is not named is forgotten."),
    max_rows: int | None = typer.Option(None, help="Rows that a table may hold."),
    machines: int = typer.Option(1, help="How many machines the ranks are spread over."),
    memory: str | None = typer.Option(
        None, help="Memory of a machine, such as 16GiB; default: what this one has."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. --set model.options.dropout=0.1"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what each table and each worker will need; ends with 1 if it does not fit."""
    flags = {
        "model": model, "embedding_dim": embedding_dim, "row_optimizer": row_optimizer,
        "batch_size": batch_size, "workers": workers, "stores": stores, "colocated": colocated,
        "cache": cache, "hot": hot, "prune": prune, "memory_budget": memory_budget,
        "admit_after": admit_after, "ttl": ttl, "max_rows": max_rows,
    }  # fmt: skip
    from rowhaul.cli.size.report import print_json, print_report
    from rowhaul.cli.train import read_config
    from rowhaul.data.files import find_schema
    from rowhaul.sizing.fit import suggestions

    given = {name: value for name, value in flags.items() if value is not None}
    run_config = read_config(config, given, settings, None)
    _check(run_config, machines, sample)
    available = machine_memory(memory)
    columns = features.split(",") if features else None
    found = find_schema(data, schema, columns, require_label=False)
    counts = _count(data, found, run_config, sample, as_json)
    run, model_of = describe_run(run_config, found, data, counts, machines)
    run.check()
    estimate = run.estimate()
    fits = estimate.needed <= available
    ways = [] if fits else list(suggestions(run, available, model_of))
    (print_json if as_json else print_report)(run, counts, estimate, available, ways)
    if not fits:
        raise typer.Exit(EXIT_TOO_LARGE)


def machine_memory(given: str | None) -> int:
    """Bytes that a machine has: as given, or this one's, or what its container grants."""
    import psutil

    from rowhaul._quantities import parse_bytes
    from rowhaul.cli.doctor.machine import _container_memory_limit
    from rowhaul.errors import ConfigError

    if given is not None:
        asked = parse_bytes(given, "--memory")
        if not asked:
            raise ConfigError(f"--memory {given}: a machine needs memory; write 16GiB, for example")
        return asked
    total = int(psutil.virtual_memory().total)
    limit = _container_memory_limit()
    return total if limit is None else min(total, limit)


def _check(config: TrainConfig, machines: int, sample: int | None) -> None:
    from rowhaul.errors import ConfigError

    if sample is not None and sample < 2:
        raise ConfigError(f"--sample is {sample}; it must be at least 2 samples")
    ranks = config.cluster.topology().num_ranks if config.cluster.workers else 1
    if not 1 <= machines <= ranks:
        raise ConfigError(
            f"--machines is {machines}, but the ranks to put on them are {ranks}: give each machine one at "
            "least (--workers, --stores)"
        )


def _count(
    data: list[str], schema: Schema, config: TrainConfig, sample: int | None, quiet: bool
) -> RowCounts:
    from rowhaul.cli.progress import counting_bar, told_when_interrupted
    from rowhaul.sizing.row_counts import count_rows

    bar = counting_bar()
    bar.disable = quiet
    limit = config.max_steps * config.batch_size or None
    with told_when_interrupted("nothing was counted to the end; --sample reads less"), bar:
        task = bar.add_task("counting rows", total=0, note="")
        return count_rows(
            data,
            schema,
            limit=limit,
            sample=sample,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def describe_run(
    config: TrainConfig, schema: Schema, data: Any, counts: RowCounts, machines: int = 1
) -> tuple[Run, Any]:
    """The run to estimate, and how its model is measured at another size of embeddings."""
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

    ends = np.cumsum(batch.lengths.sum(axis=1, dtype=np.int64))
    keys = dict(zip(batch.features, np.split(batch.values, ends[:-1]), strict=True))
    return sum(
        len(np.unique(np.concatenate([keys[name] for name in features])))
        for features in schema.tables.values()
    )
