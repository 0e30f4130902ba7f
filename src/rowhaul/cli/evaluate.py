"""`rowhaul evaluate` and `rowhaul predict`: a trained run over other data."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import console, facts_table, say
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar
from rowhaul.cli.run import DATA

_RUN = typer.Argument(..., help="The --out of a `train`, a checkpoint (folder or URL), or an export.")
_HELD_OUT = typer.Option(
    [], "--data", help="Parquet files, a folder or a glob; repeatable. Default: what the run held out."
)
_BATCH_SIZE = typer.Option(8192, help="Samples scored at a time.")
_ON_UNKNOWN = typer.Option(None, help="What keys never trained read as: init, default, error or tail.")
_METRIC_NAMES = {"gauc": "GAUC", "mrr": "MRR"}


def evaluate(
    run: str = _RUN,
    data: list[str] = _HELD_OUT,
    batch_size: int = _BATCH_SIZE,
    on_unknown: str | None = _ON_UNKNOWN,
    as_json: bool = AS_JSON,
) -> None:
    """Measure a trained model: AUC, log loss, normalised entropy, accuracy; also within groups."""
    from dataclasses import asdict

    from rowhaul.data.stream import SampleStream
    from rowhaul.train import load_trained
    from rowhaul.train.unknown_keys import unknown_text

    trainer = load_trained(run, on_unknown)
    stream = SampleStream(data or _held_out(run), trainer.schema, batch_size)
    with progress_bar("evaluating", "nothing was written") as progress:
        values = asdict(trainer.evaluate(stream, progress))
    if as_json:
        print_json(values)
        _warn_of_unknown(run, values["unknown_by_feature"])
        return
    share, by_feature = values.pop("unknown_keys"), values.pop("unknown_by_feature")
    values |= values.pop("in_groups")
    for task, of_task in values.pop("tasks").items():
        values |= {f"{task}: {name}": value for name, value in of_task.items()}
    table = facts_table()
    for name, value in values.items():
        if value != "":
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if name != "note" else value
            table.add_row(_METRIC_NAMES.get(name, name.replace("_", " ").replace("auc", "AUC")), shown)
    if share is not None:
        table.add_row("never trained", unknown_text(share, by_feature))
    console.print(table, highlight=False)
    _warn_of_unknown(run, by_feature)


def _held_out(run: str) -> list[str]:
    from rowhaul.errors import ConfigError
    from rowhaul.train.run_data import remembered_data

    folder = _folder(run)
    remembered = remembered_data(folder) if folder is not None else None
    if remembered is None or not remembered.eval_data:
        raise ConfigError(f"{run} does not say which samples were held out: name some with --data")
    return remembered.eval_data


def _folder(run: str) -> Path | None:
    """Return the folder of a run that is on this machine, given it or one of its checkpoints."""
    from rowhaul.checkpoint import as_place
    from rowhaul.checkpoint.location import local_path
    from rowhaul.train.run_folder import CHECKPOINTS

    path = local_path(as_place(run))
    return path.parent.parent if path is not None and path.parent.name == CHECKPOINTS else path


def _warn_of_unknown(run: str, by_feature: dict[str, float]) -> None:
    """Compare the share of ids never trained with that of the run's own evaluation."""
    from rowhaul.train.log import unknown_keys_of
    from rowhaul.train.unknown_keys import unknown_warning

    folder = _folder(run)
    before = unknown_keys_of(folder) if folder is not None else None
    if warning := unknown_warning(by_feature, before):
        typer.echo(warning, err=True)


def predict(
    run: str = _RUN,
    data: list[str] = DATA,
    out: Path = typer.Option(
        ..., "--out", help="Scores to write, a .parquet or .csv file in the order of the data."
    ),
    keep: str = typer.Option("", help="Columns of the data to copy beside the scores, comma-separated."),
    batch_size: int = _BATCH_SIZE,
    on_unknown: str | None = _ON_UNKNOWN,
    overwrite: bool = typer.Option(False, help="Replace --out if it exists."),
    fill_absent: bool = typer.Option(
        False, "--fill-absent", help="Read columns that the data lacks as missing: no ids, numbers of 0."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Write one click probability for each sample; keys never trained do not stop it."""
    from rowhaul.nn.key_counts import KeyCounts
    from rowhaul.train.predict import predict_file
    from rowhaul.train.unknown_keys import unknown_text

    keys = KeyCounts()
    columns = [name for name in keep.split(",") if name]
    with progress_bar("predicting", "nothing was written") as progress:
        rows = predict_file(
            run,
            data,
            out,
            keep=columns,
            batch_size=batch_size,
            on_unknown=on_unknown,
            overwrite=overwrite,
            progress=progress,
            keys=keys,
            fill_absent=fill_absent,
        )
    if as_json:
        print_json(
            {"out": out, "num_scores": rows, "unknown_keys": keys.share, "unknown_by_feature": keys.shares}
        )
    else:
        say(f"{rows:,} scores in {out} (column `score`; of several labels `score_NAME`)")
    if keys.share is not None and not as_json:
        say(f"never trained: {unknown_text(keys.share, keys.shares)}")
    _warn_of_unknown(run, keys.shares)
