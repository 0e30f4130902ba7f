"""`rowhaul evaluate` and `rowhaul predict`: a trained run over other data."""

from __future__ import annotations

from pathlib import Path

import typer


def evaluate(
    run: Path = typer.Argument(..., help="The --out of a `train`, one of its checkpoints, or an export."),
    data: list[str] = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable."),
    batch_size: int = typer.Option(8192, help="Samples scored at a time."),
    on_unknown: str | None = typer.Option(None, help="Keys never trained read as: init, default or error."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Measure a trained model: AUC, log loss, normalised entropy, accuracy."""
    import json
    from dataclasses import asdict

    from rich.table import Table

    from rowhaul.cli.progress import console, counting_bar, told_when_interrupted
    from rowhaul.data.stream import SampleStream
    from rowhaul.train import load_trained

    trainer = load_trained(run, on_unknown)
    stream = SampleStream(data, trainer.schema, batch_size)
    with told_when_interrupted("nothing was written"), counting_bar() as bar:
        task = bar.add_task("evaluating", total=stream.num_samples, note="", visible=not as_json)
        values = asdict(trainer.evaluate(stream, lambda done, total: bar.update(task, completed=done)))
    if as_json:
        typer.echo(json.dumps(values))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in values.items():
        if value != "":
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if name != "note" else value
            table.add_row(name.replace("_", " ").replace("auc", "AUC"), shown)
    console.print(table, highlight=False)


def predict(
    run: Path = typer.Argument(..., help="The --out of a `train`, one of its checkpoints, or an export."),
    data: list[str] = typer.Option(..., "--data", help="Parquet files, a folder or a glob; repeatable."),
    out: Path = typer.Option(..., "--out", help="Parquet file of scores to write, in the order of the data."),
    keep: str = typer.Option("", help="Columns of the data to copy beside the scores, comma-separated."),
    batch_size: int = typer.Option(8192, help="Samples scored at a time."),
    on_unknown: str | None = typer.Option(None, help="Keys never trained read as: init, default or error."),
    overwrite: bool = typer.Option(False, help="Replace --out if it exists."),
) -> None:
    """Score samples: one click probability a row; keys never seen in training do not stop it."""
    from rowhaul.cli.progress import console, counting_bar, told_when_interrupted
    from rowhaul.train.predict import predict_file

    with told_when_interrupted("nothing was written"), counting_bar() as bar:
        task = bar.add_task("predicting", total=0, note="")
        rows = predict_file(
            run,
            data,
            out,
            keep=[name for name in keep.split(",") if name],
            batch_size=batch_size,
            on_unknown=on_unknown,
            overwrite=overwrite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"{rows:,} scores in {out} (column `score`)", highlight=False, markup=False)
