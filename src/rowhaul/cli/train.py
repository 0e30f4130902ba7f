"""`rowhaul train`: from Parquet files to a run folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rowhaul.train import RunResult, TrainConfig

# Flags that stand for a setting of the configuration file.
_SETTING_OF_FLAG = {
    "model": "model.name",
    "embedding_dim": "model.embedding_dim",
    "row_optimizer": "rows.name",
    "row_lr": "rows.lr",
    "dense_optimizer": "dense.name",
    "dense_lr": "dense.lr",
    "batch_size": "batch_size",
    "epochs": "epochs",
    "shuffle_rows": "shuffle_rows",
    "max_steps": "max_steps",
    "seed": "seed",
    "precision": "precision",
    "eval_every": "eval_every",
    "checkpoint_every": "checkpoint_every",
    "threads": "threads",
    "workers": "cluster.workers",
    "stores": "cluster.stores",
    "colocated": "cluster.colocated",
    "peer_to_peer": "cluster.peer_to_peer",
    "dispatcher": "cluster.dispatcher",
    "sync": "cluster.sync",
    "cache": "cluster.cache",
    "shares": "cluster.shares",
    "links": "cluster.links",
    "look_ahead": "cluster.look_ahead",
    "data_from": "cluster.data_from",
    "prune": "prune.ratio",
    "memory_budget": "prune.budget",
    "admit_after": "tables.default.admit_after",
    "ttl": "tables.default.ttl",
    "max_rows": "tables.default.max_rows",
    "evict": "tables.default.evict",
    "hot": "cluster.hot_rows",
}

TOPOLOGIES = ("stores", "colocated")


def train(
    config: Path | None = typer.Argument(
        None, help="YAML or TOML settings; none is needed for the defaults."
    ),
    data: list[str] = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable."),
    out: Path | None = typer.Option(None, "--out", help="Folder of the run; without it nothing is saved."),
    eval_data: list[str] = typer.Option(
        [], "--eval-data", help="Held-out files; default: the folder test/ beside the data, if there is one."
    ),
    schema: Path | None = typer.Option(
        None, "--schema", help="Schema file; default: schema.yaml beside the data."
    ),
    features: str | None = typer.Option(
        None, "--features", help="Id columns, comma-separated, of data without a schema."
    ),
    label: str | None = typer.Option(None, "--label", help="Label column of data without a schema."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in --out."),
    model: str | None = typer.Option(None, help="wide_deep, deepfm, dcn, dlrm, ncf or legacy."),
    embedding_dim: int | None = typer.Option(None, help="Values in an embedding."),
    row_optimizer: str | None = typer.Option(None, help="sgd, adagrad, rowwise_adagrad or adam."),
    row_lr: float | None = typer.Option(None, help="Learning rate of the rows."),
    dense_optimizer: str | None = typer.Option(None, help="Any class of torch.optim."),
    dense_lr: float | None = typer.Option(None, help="Learning rate of the dense weights."),
    batch_size: int | None = typer.Option(None, help="Samples in the global batch."),
    epochs: int | None = typer.Option(None, help="Passes over the data."),
    shuffle_rows: int | None = typer.Option(None, help="Samples in the shuffling window; 0: files' order."),
    max_steps: int | None = typer.Option(None, help="Stop after so many steps; 0: the end of the data."),
    seed: int | None = typer.Option(None, help="Of rows, dense weights, dropout and shuffling."),
    precision: str | None = typer.Option(None, help="float32 or float64."),
    eval_every: int | None = typer.Option(None, help="Steps between evaluations; 0: at the end only."),
    checkpoint_every: int | None = typer.Option(None, help="Steps between checkpoints; 0: at the end."),
    threads: int | None = typer.Option(None, help="PyTorch threads; 0: PyTorch's choice."),
    workers: int | None = typer.Option(None, help="Ranks that train; under torchrun: all but the stores."),
    stores: int | None = typer.Option(None, help="Ranks that only hold rows."),
    colocated: bool | None = typer.Option(None, "--colocated", help="Workers store the rows themselves."),
    peer_to_peer: bool | None = typer.Option(None, "--peer-to-peer", help="Workers send rows to each other."),
    dispatcher: str | None = typer.Option(None, help="Who trains what: joint, esd:1, laia, random, ..."),
    sync: str | None = typer.Option(None, help="on-demand, full, static or bounded:S (not exact)."),
    cache: str | None = typer.Option(None, help="What a worker may hold: rows, or bytes such as 512MiB."),
    shares: str | None = typer.Option(None, help="equal, auto (by links and speed) or weights: 2,1,1"),
    links: str | None = typer.Option(None, help="equal, measure, or speeds: 50mbit*4,5mbit*4"),
    look_ahead: int | None = typer.Option(None, help="Batches known beyond the one that is planned."),
    data_from: str | None = typer.Option(None, help="every_host, or rank0: read once and sent out."),
    admit_after: int | None = typer.Option(None, help="Rows of a table learn from the N-th sighting on."),
    ttl: int | None = typer.Option(None, help="Forget rows that N steps have not named."),
    max_rows: int | None = typer.Option(None, help="Most rows of a table; see --evict."),
    evict: str | None = typer.Option(None, help="Rows that go where there are more: lru or lfu."),
    hot: str | None = typer.Option(None, help="Rows that every worker holds: auto, or how many."),
    topology: str | None = typer.Option(None, help="stores, or colocated: the same as --colocated."),
    prune: str | None = typer.Option(None, help="Share of the rows' values to prune, such as 90%."),
    memory_budget: str | None = typer.Option(None, help="Or memory for rows, such as 2GiB."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Any other setting, e.g. --set model.options.dropout=0.1"
    ),
) -> None:
    """Train a model on Parquet files, evaluate it and save it; with --workers, over several processes."""
    flags = {
        flag: value for flag, value in locals().items() if flag in _SETTING_OF_FLAG and value is not None
    }
    flags |= topology_flag(topology, colocated)
    from rowhaul.cli.progress import console
    from rowhaul.cli.ranks import is_first_rank, launch_ranks
    from rowhaul.cluster import is_launched
    from rowhaul.data.files import find_schema

    run_config = read_config(config, flags, settings, out if resume else None)
    has_data = not is_launched() or is_first_rank() or run_config.cluster.data_from != "rank0"
    found = find_schema(data, schema, features.split(",") if features else None, label) if has_data else None
    if found is not None and run_config.cluster.workers and not is_launched():
        launch_ranks(run_config, found)
        return
    held_out = (eval_data or held_out_beside(data)) if has_data else []
    result = train_with_progress(run_config, found, data, out, held_out, resume)
    if is_launched() and not is_first_rank():
        return
    if not result.steps_taken:
        console.print(f"nothing left to train: the run was finished after {result.step:,} steps")
    print_result(result)
    if result.interrupted:
        if out:
            again = " ".join(f"--data '{one}'" for one in data)
            command = f"rowhaul train --resume --out {out} {again}"
            if is_launched() and "TORCHELASTIC_RUN_ID" in os.environ:
                command = "the same torchrun command with --resume"
            console.print(
                f"\nStopped and saved. To go on: {command}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        raise typer.Exit(130)
    if out:
        example = held_out[0] if held_out else "new.parquet"
        console.print(
            f"\nSaved in {out}. Next:\n"
            f"  rowhaul predict {out} --data '{example}' --out scores.parquet\n"
            f"  tensorboard --logdir {out}/tensorboard",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def topology_flag(topology: str | None, colocated: bool | None) -> dict[str, Any]:
    """What ``--topology`` says as the flag that it stands for."""
    from rowhaul.errors import ConfigError

    if topology is None:
        return {}
    if topology not in TOPOLOGIES or (colocated and topology != "colocated"):
        beside = " beside --colocated" if colocated else ""
        raise ConfigError(f"--topology must be {' or '.join(TOPOLOGIES)}; got {topology!r}{beside}")
    return {"colocated": topology == "colocated"}


def read_config(
    path: Path | None, flags: dict[str, Any], settings: list[str], resumed: Path | None
) -> TrainConfig:
    """The configuration file (or the resumed run's), with flags and ``--set`` over it."""
    import yaml

    from rowhaul.errors import ConfigError
    from rowhaul.train.config import TrainConfig, override, read_settings
    from rowhaul.train.run_folder import CONFIG_FILE

    if path is None and resumed is not None and (resumed / CONFIG_FILE).is_file():
        path = resumed / CONFIG_FILE
    given = read_settings(path) if path else {}
    for flag, value in flags.items():
        override(given, _SETTING_OF_FLAG[flag], value)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: expected NAME=VALUE, e.g. --set rates.decay=cosine")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting}: the value is no YAML: {error}") from None
        override(given, name.strip(), value)
    return TrainConfig.from_dict(given)


def held_out_beside(data: list[str]) -> list[str]:
    """The held-out part that `prepare` and `generate` put in ``test/`` beside the training files."""
    from rowhaul.data.files import expand_files
    from rowhaul.data.folder.files import TEST_FOLDER
    from rowhaul.data.folder.writer import MANIFEST_FILE

    folders = {path.parent for path in expand_files(data)}
    beside = {folder / TEST_FOLDER for folder in folders if (folder / MANIFEST_FILE).is_file()}
    held_out = beside - folders  # a glob may have taken the test files for training
    return sorted(str(folder) for folder in held_out if any(folder.glob("*.parquet")))


def train_with_progress(
    config: TrainConfig, schema: Any, data: Any, out: Path | None, eval_data: Any, resume: bool = False
) -> RunResult:
    """Train under a progress bar, as one process or as one rank; Ctrl-C stops after the step under way."""
    from contextlib import nullcontext

    from rowhaul._environment import keep_freed_memory, let_threads_take_turns
    from rowhaul.cli.progress import StopOnSignal, TrainingProgress, told_when_interrupted
    from rowhaul.cli.ranks import is_first_rank
    from rowhaul.cluster import is_launched
    from rowhaul.train import train_run
    from rowhaul.train.distributed.run import train_on_cluster

    keep_freed_memory()
    if is_launched():
        let_threads_take_turns()
    train = train_on_cluster if is_launched() else train_run
    shown = TrainingProgress() if is_first_rank() else nullcontext()
    told = told_when_interrupted("the run was not saved since its last checkpoint")
    with told, StopOnSignal() as should_stop, shown as listener:
        return train(
            config,
            schema,
            data,
            out=out,
            eval_data=eval_data or None,
            resume=resume,
            listener=listener,
            should_stop=should_stop,
        )


def pruning_lines(result: RunResult) -> list[tuple[str, str]]:
    """What pruning has left, in a few lines."""
    report = result.pruning
    if report is None:
        return []
    held = sum(report.rows_by_chunks[1:])
    by_chunks = ", ".join(f"{count:,} with {chunks}" for chunks, count in enumerate(report.rows_by_chunks))
    fullest = sorted(report.tables, key=lambda one: -one.mean_dims)
    return [
        (
            "pruned",
            f"{report.ratio:.1%} of the values: {report.value_bytes / 2**20:,.1f} MiB are left of "
            f"{report.unpruned_value_bytes / 2**20:,.1f}, in {held:,} of {report.num_rows:,} rows",
        ),
        ("rows by chunks", by_chunks),
        (
            "values a row holds",
            f"from {fullest[-1].mean_dims:.1f} in {fullest[-1].name!r} to {fullest[0].mean_dims:.1f} in "
            f"{fullest[0].name!r}, of rows in the index",
        ),
    ]


def print_result(result: RunResult, bayes_auc: float | None = None) -> None:
    """The numbers a user trained for, and what they cost."""
    import resource
    import sys

    from rich.table import Table

    from rowhaul.cli.progress import console

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if result.metrics is not None:
        metrics = result.metrics
        best = f"   (best possible on this log: {bayes_auc:.4f})" if bayes_auc else ""
        table.add_row("AUC", f"{metrics.auc:.4f}{best}")
        table.add_row("log loss", f"{metrics.log_loss:.4f}")
        worse = metrics.normalised_entropy > 1
        verdict = (
            "worse than the base rate alone: lower the rates" if worse else "1 = only knows the base rate"
        )
        table.add_row("normalised entropy", f"{metrics.normalised_entropy:.4f}   ({verdict})")
        table.add_row("accuracy", f"{metrics.accuracy:.4f}   on {metrics.num_samples:,} held-out samples")
        if metrics.note:
            table.add_row("", metrics.note)
    table.add_row("samples per second", f"{result.samples_per_second:,.0f}")
    table.add_row("trained", f"{result.samples:,} samples in {result.step:,} steps")
    if result.row_counts is not None:
        counts = result.row_counts
        table.add_row(
            "rows came and went",
            f"{counts.admitted:,} admitted, {counts.expired:,} expired, {counts.over_limit:,} over a limit; "
            f"{counts.gradients_dropped:,} gradients of others dropped",
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    for name, text in pruning_lines(result):
        table.add_row(name, text)
    row_mib, peak_mib = result.row_bytes / 2**20, peak / 2**20
    table.add_row("rows", f"{result.num_rows:,} in {row_mib:,.0f} MiB with optimizer state and index")
    table.add_row("peak memory", f"{peak_mib:,.0f} MiB for the whole process")
    console.print(table, highlight=False)
