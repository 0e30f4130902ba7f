"""`rowhaul evaluate` and `rowhaul predict`: a trained run over other data."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import console, facts_table, say
from rowhaul.cli.progress import progress_bar
from rowhaul.cli.run import AS_JSON, DATA

_RUN = typer.Argument(..., help="The --out of a `train`, a checkpoint (folder or URL), or an export.")
_BATCH_SIZE = typer.Option(8192, help="Samples scored at a time.")
_ON_UNKNOWN = typer.Option(None, help="What keys never trained read as: init, default or error.")


def evaluate(
    run: str = _RUN,
    data: list[str] = DATA,
    batch_size: int = _BATCH_SIZE,
    on_unknown: str | None = _ON_UNKNOWN,
    as_json: bool = AS_JSON,
) -> None:
    """Measure a trained model: AUC, log loss, normalised entropy, accuracy."""
    import json
    from dataclasses import asdict

    from rowhaul.data.stream import SampleStream
    from rowhaul.train import load_trained

    trainer = load_trained(run, on_unknown)
    stream = SampleStream(data, trainer.schema, batch_size)
    with progress_bar("evaluating", "nothing was written", quiet=as_json) as progress:
        values = asdict(trainer.evaluate(stream, progress))
    if as_json:
        typer.echo(json.dumps(values))
        return
    table = facts_table()
    for name, value in values.items():
        if value != "":
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if name != "note" else value
            table.add_row(name.replace("_", " ").replace("auc", "AUC"), shown)
    console.print(table, highlight=False)


def predict(
    run: str = _RUN,
    data: list[str] = DATA,
    out: Path = typer.Option(..., "--out", help="Parquet file of scores to write, in the order of the data."),
    keep: str = typer.Option("", help="Columns of the data to copy beside the scores, comma-separated."),
    batch_size: int = _BATCH_SIZE,
    on_unknown: str | None = _ON_UNKNOWN,
    overwrite: bool = typer.Option(False, help="Replace --out if it exists."),
) -> None:
    """Write one click probability for each sample; keys never trained do not stop it."""
    from rowhaul.train.predict import predict_file

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
        )
    say(f"{rows:,} scores in {out} (column `score`)")
