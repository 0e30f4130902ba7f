"""`rowhaul prepare`: raw logs to a data folder."""

from __future__ import annotations

from pathlib import Path

import typer


def prepare(
    inputs: list[Path] = typer.Argument(
        ..., help="Raw log files, plain or .gz; a zip or folder for some formats."
    ),
    format: str = typer.Option(
        ..., "--format", help="criteo, criteo-tb, criteo-search, avazu, movielens, taobao, csv or parquet."
    ),
    out: Path = typer.Option(..., "--out", help="Data folder to write; an interrupted one is resumed."),
    schema: Path | None = typer.Option(None, "--schema", help="Schema file, for csv and parquet."),
    on_bad_line: str = typer.Option("error", help="What to do with a malformed line: error or skip."),
    test_share: float = typer.Option(0.1, help="Share of the rows, the last ones, that goes to test/."),
    check_collisions: bool = typer.Option(
        False, help="Check that no two strings got one key (another pass)."
    ),
    overwrite: bool = typer.Option(False, help="Replace --out if it is complete."),
) -> None:
    """Turn raw logs into Parquet files with a schema, ready to train on."""
    from rowhaul.cli.progress import console, share_bar
    from rowhaul.data.prepare import prepare as prepare_data

    with share_bar() as bar:
        task = bar.add_task("preparing", total=1.0, note="")
        report = prepare_data(
            inputs,
            out,
            format,
            schema=schema,
            on_bad_line=on_bad_line,
            test_share=test_share,
            check_collisions=check_collisions,
            overwrite=overwrite,
            progress=lambda rows, share: bar.update(task, completed=share, note=f"{rows:,} rows"),
        )
        bar.update(task, completed=1.0)
    console.print(f"{report.rows:,} rows in {out}", highlight=False)
