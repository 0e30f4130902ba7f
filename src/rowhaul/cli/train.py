"""`rowhaul train`: from Parquet files to a run folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from rowhaul.cli.console import bytes_text, console, facts_table, say, typed, unwritten_output_lost
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.monitoring import (
    EXPLAIN,
    LOG_FOLDER,
    LOG_JSON,
    METRICS_ADDRESS,
    METRICS_PORT,
    STALLED_AFTER,
    check_monitoring,
    monitored,
    with_monitoring,
)
from rowhaul.cli.progress import (
    COUNTING,
    EXIT_INTERRUPTED,
    StopOnSignal,
    TrainingProgress,
    exit_when_interrupted,
    print_stacks_on_request,
    progress_bar,
)
from rowhaul.cli.run import RESUMABLE_DATA, RunOptions, is_first_rank, launch_ranks, with_run_options
from rowhaul.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rowhaul.train import RunResult, TrainConfig
    from rowhaul.train.run_data import RunData


@partial(with_run_options, data=RESUMABLE_DATA)
def train(
    options: RunOptions,
    out: Path | None = typer.Option(None, "--out", help="Folder of the run: log, settings, checkpoints."),
    eval_data: list[str] = typer.Option(
        [],
        "--eval-data",
        help="Held-out files; default: those of the resumed run, or the folder test/ beside the data.",
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out or --checkpoints."),
    metrics_port: int | None = METRICS_PORT,
    metrics_address: str | None = METRICS_ADDRESS,
    stalled_after: float | None = STALLED_AFTER,
    log_json: bool | None = LOG_JSON,
    log_folder: Path | None = LOG_FOLDER,
    explain: bool | None = EXPLAIN,
    as_json: bool = AS_JSON,
) -> None:
    """Train a model on Parquet files, evaluate it and save it; with --workers, over several processes."""
    from rowhaul.checkpoint.location import local_folder
    from rowhaul.cluster import is_launched
    from rowhaul.data.sources.opening import stream_of
    from rowhaul.data.sources.redis_stream import without_password
    from rowhaul.train.run_folder import settings_to_resume
    from rowhaul.train.run_stream import check_streamable, read_by_rank0

    out = local_folder(out) if out is not None else None
    saved = settings_to_resume(out, options.flags.get("checkpoints")) if resume else None
    resumed = saved[0].to_dict() if saved is not None else None
    config, data = options.read_config(resumed, publishes=True), options.data
    if resume and out is None and not config.checkpoints:
        raise ConfigError("--resume needs to know which run: name its folder (--out), or its --checkpoints")
    config = with_monitoring(
        config, metrics_port, metrics_address, stalled_after, log_json, log_folder, explain
    )
    remembered = _data_of(out) if resume and out else None
    data = data or (remembered.data if remembered else [])
    if not config.cluster.workers and not is_launched():
        options.refuse_cluster_settings()
    follow = config.stream.follow
    is_stream = bool(data) and stream_of(data, follow) is not None
    if data:  # a rank that gets its samples from another one does not know
        options.refuse_idle_flags(config, is_stream)
    if is_stream:
        check_streamable(config, is_rank=is_launched())
        if config.cluster.workers or is_launched():
            config = read_by_rank0(config, data)
    has_data = not is_launched() or is_first_rank() or config.cluster.data_from != "rank0"
    if has_data and not data:
        raise _without_data(resume, out or config.checkpoints, bool(resumed))
    schema = (
        replace(options, data=data).find_schema(saved=saved[1] if saved else None, run=out, follow=follow)
        if has_data
        else None
    )
    if resumed:
        config = _as_begun(config, resumed)
    elif schema is not None and not is_launched():
        config = _fitted_with_bar(options, config, schema, None if is_stream else data)
    if schema is not None and config.cluster.workers and not is_launched():
        check_monitoring(config.monitoring, out)
        if not resume:  # a run that resumes drops what is for another number of workers
            config.cluster.check_workers(config.cluster.workers)
        try:
            launch_ranks(config, schema, [*sys.argv[1:], *_as_options(config)])
        except ClusterError as error:
            raise _with_way_on(error, config, out) from None
        return
    held_out = eval_data or (remembered.eval_data if remembered else [])
    held_out = (held_out or ([] if is_stream else held_out_beside(data))) if has_data else []
    fit = partial(_fitted, options, schema, data) if not resumed else None
    result = train_with_progress(config, schema, data, out, held_out, resume, fit)
    if is_launched() and not is_first_rank():
        return
    if not result.steps_taken and not result.interrupted:
        say(_why_no_step(result))
    if as_json:
        print_json({"out": out, **numbers_of(result)})
    else:
        print_result(result)
    if result.metrics is None and not held_out and not is_stream:
        say(
            "AUC: not measured, for want of held-out samples; name some with --eval-data, or let "
            "`rowhaul prepare` split off the last tenth"
        )
    if result.interrupted:
        if out or config.checkpoints:
            files = " ".join(f"--data {typed(without_password(one))}" for one in data)
            where = f"--out {typed(out)}" if out else f"--checkpoints {typed(config.checkpoints)} {files}"
            command = f"rowhaul train --resume {where}"
            if is_launched() and "TORCHELASTIC_RUN_ID" in os.environ:
                command = "the same torchrun command with --resume"
            say(f"\nStopped and saved. To continue: {command}")
        raise typer.Exit(EXIT_INTERRUPTED)
    if out:
        example = held_out[0] if held_out else "new.parquet"
        say(
            f"\nSaved in {out}. Next:\n"
            f"  rowhaul predict {typed(out)} --data {typed(example)} --out scores.parquet\n"
            f"  tensorboard --logdir {typed(out / 'tensorboard')}"
        )


def _without_data(resume: bool, place: Path | str, holds_run: bool) -> ConfigError:
    """Say what to train on is missing, or the run that knows it."""
    name_it = "name the Parquet files (--data 'logs/*.parquet')"
    if not resume:
        return ConfigError(f"there is nothing to train on: {name_it}")
    if holds_run:
        return ConfigError(f"{place} does not say what it was trained on: {name_it}")
    return ConfigError(
        f"{place} holds no run to resume; see whether its name is right. To start one, leave out --resume "
        f"and {name_it}"
    )


def _why_no_step(result: RunResult) -> str:
    """Say why a run has trained nothing, this time."""
    if result.stream_ended:
        since = f" after step {result.step:,}" if result.step else ""
        return f"no sample arrived: nothing was trained{since}"
    ended = "had ended early" if result.ended_early else "was finished"
    return f"nothing left to train: the run {ended} after {result.step:,} steps"


def _as_begun(config: TrainConfig, resumed: dict[str, Any]) -> TrainConfig:
    from rowhaul.train.config import TrainConfig
    from rowhaul.train.fitting import as_fitted

    found = as_fitted(config, TrainConfig.from_dict(resumed))
    if found.prune.ratio != config.prune.ratio and is_first_rank():
        say(f"memory budget: {found.prune.budget}, which the run made of its --prune when it began")
    return found


def _fitted_with_bar(options: RunOptions, config: TrainConfig, schema: Any, data: Any) -> TrainConfig:
    """Decide what a memory budget leaves open, before there is a bar for training."""
    interrupted = "the ids were not all counted, and nothing was trained"
    with progress_bar(COUNTING, interrupted, quiet=not config.prune.is_shared) as progress:
        return _fitted(options, schema, data, config, progress)


def _fitted(options: RunOptions, schema: Any, data: Any, config: TrainConfig, progress: Any) -> TrainConfig:
    """Decide what a memory budget leaves open, and say it."""
    from rowhaul.train.fitting import fitted

    choose_dim = not options.gives("model.embedding_dim")
    found = fitted(config, schema, data, choose_dim=choose_dim, progress=progress)
    if found.note:
        say(f"memory budget: {found.note}")
    return found.config


def _as_options(config: TrainConfig) -> list[str]:
    """What was decided for pruning or a memory budget, as options for other ranks."""
    from rowhaul.train.fitting import decisions

    if not config.prune.is_used:
        return []
    decided = decisions(config)
    settings = {f"prune.{name}": value for name, value in decided["prune"].items()}
    settings |= {"model.embedding_dim": decided["embedding_dim"], "row_dtype": decided["row_dtype"]}
    for name, value in decided["row_options"].items():
        # As YAML has it: there 7e-09 is a text.
        settings[f"rows.options.{name}"] = yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def _with_way_on(error: ClusterError, config: TrainConfig, out: Path | None) -> ClusterError:
    """Add how to continue, if something was saved."""
    from rowhaul.checkpoint import latest_checkpoint
    from rowhaul.train.run_folder import checkpoints_of

    checkpoints = checkpoints_of(config, out)
    saved = latest_checkpoint(checkpoints) if checkpoints is not None else None
    if saved is None:
        return error
    checkpoints_given = f"--checkpoints {typed(config.checkpoints)} and the same --data"
    where = f"--out {typed(out)}" if out else checkpoints_given
    return ClusterError(f"{error}\nTo continue from {saved.name}: rowhaul train --resume {where}")


def _data_of(run: Path) -> RunData | None:
    from rowhaul.train.run_data import remembered_data

    return remembered_data(run)


def held_out_beside(data: list[str]) -> list[str]:
    """The held-out part that `prepare` and `generate` put in ``test/`` beside the training files."""
    from rowhaul.data.files import expand_files
    from rowhaul.data.folder.files import TEST_FOLDER
    from rowhaul.data.folder.writer import MANIFEST_FILE

    folders = {path.parent for path in expand_files(data)}
    beside = {folder / TEST_FOLDER for folder in folders if (folder / MANIFEST_FILE).is_file()}
    held_out = beside - folders  # a glob may have included the test files in the training data
    return sorted(str(folder) for folder in held_out if any(folder.glob("*.parquet")))


def train_with_progress(
    config: TrainConfig,
    schema: Any,
    data: Any,
    out: Path | None,
    eval_data: Any,
    resume: bool = False,
    fit: Callable[..., TrainConfig] | None = None,
) -> RunResult:
    """Train under a progress bar, as one process or as one rank; Ctrl-C stops after the current step.

    On a rank ``fit``, given the configuration and ``progress``, decides what a memory budget leaves open.
    """
    from contextlib import nullcontext

    from rowhaul._environment import keep_freed_memory, switch_threads_sooner
    from rowhaul.cluster import is_launched
    from rowhaul.train import train_run
    from rowhaul.train.distributed.run import train_on_cluster

    keep_freed_memory()
    if is_launched() or config.device_bytes:
        switch_threads_sooner()
    shown = TrainingProgress() if is_first_rank() else nullcontext()
    print_stacks_on_request()
    interruptible = exit_when_interrupted("nothing was saved since the last checkpoint")
    watched = monitored(config.monitoring, out)
    lossy = unwritten_output_lost("training goes on without it")
    with lossy, interruptible, StopOnSignal() as should_stop, watched as monitor, shown as listener:
        counting = listener.counting if listener is not None else None  # only rank 0 counts
        decide = partial(fit, progress=counting) if fit is not None else None
        train = partial(train_on_cluster, fit=decide) if is_launched() else train_run
        return train(
            config,
            schema,
            data,
            out=out,
            eval_data=eval_data or None,
            resume=resume,
            listener=listener,
            should_stop=should_stop,
            monitor=monitor,
        )


def numbers_of(result: RunResult) -> dict[str, Any]:
    """How a run ended, for `--json`."""
    return {**vars(result), "peak_memory_bytes": _peak_memory()}


def _peak_memory() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def print_result(result: RunResult, bayes_auc: float | None = None) -> None:
    """Print the metrics, the speed and the memory of a run."""
    from rowhaul.pruning.report import PruneReport
    from rowhaul.train.unknown_keys import unknown_text, unknown_warning

    table = facts_table()
    if result.metrics is not None:
        metrics = result.metrics
        best = f"   (best possible on this log: {bayes_auc:.4f})" if bayes_auc else ""
        worse = metrics.normalised_entropy > 1
        verdict = (
            "worse than the base rate alone: lower the learning rates" if worse else "1 = the base rate alone"
        )
        table.add_row("AUC", f"{metrics.auc:.4f}{best}")
        table.add_row("log loss", f"{metrics.log_loss:.4f}")
        table.add_row("normalised entropy", f"{metrics.normalised_entropy:.4f}   ({verdict})")
        table.add_row("accuracy", f"{metrics.accuracy:.4f}   on {metrics.num_samples:,} held-out samples")
        for name, value in metrics.in_groups.items():
            table.add_row(name, f"{value:.4f}")
        for task, values in metrics.tasks.items():
            table.add_row(task, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        if metrics.note:
            table.add_row("", metrics.note)
        if metrics.unknown_keys is not None:
            table.add_row("never trained", unknown_text(metrics.unknown_keys, metrics.unknown_by_feature))
    if result.samples_per_second:
        speed = f"{result.samples_per_second:,.0f}   without starting, evaluating and saving"
        table.add_row("samples per second", speed)
    table.add_row("trained", f"{result.samples:,} samples in {result.step:,} steps")
    if result.one_machine:
        table.add_row("one machine", result.one_machine)
    if result.waits:
        table.add_row("waits", result.waits)
    if result.row_counts is not None:
        counts = result.row_counts
        table.add_row(
            "row policies",
            f"{counts.admitted:,} admitted, {counts.expired:,} expired, {counts.over_limit:,} over a limit; "
            f"{counts.gradients_dropped:,} gradients of rows not admitted dropped",
        )
    if result.note:
        table.add_row("data", result.note)
    if result.inexact:
        table.add_row("not exact", result.inexact)
    for name, text in result.pruning.lines() if result.pruning is not None else []:
        table.add_row(name, text)
    is_pruned = isinstance(result.pruning, PruneReport)  # then most of the rows read so far have no entry
    table.add_row(
        "rows in the index" if is_pruned else "rows",
        f"{result.num_rows:,} in {bytes_text(result.row_bytes)} with optimizer state and index",
    )
    table.add_row("peak memory", f"{bytes_text(_peak_memory())} for the whole process")
    console.print(table, highlight=False)
    if result.metrics is not None and (warning := unknown_warning(result.metrics.unknown_by_feature)):
        say(warning)
