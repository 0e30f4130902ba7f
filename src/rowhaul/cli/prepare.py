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
    positive_from: float | None = typer.Option(
        None, help="Ratings from here on count as a click (movielens; default 4)."
    ),
    time_order: bool | None = typer.Option(
        None,
        "--time-order/--file-order",
        help="Sort by time (default where the files are not) or keep the order.",
    ),
    on_bad_line: str = typer.Option("error", help="What to do with a malformed line: error or skip."),
    test_share: float = typer.Option(0.1, help="Share of the rows, the last ones, that goes to test/."),
    check_collisions: bool = typer.Option(
        False, help="Check that no two strings got one key (another pass)."
    ),
    overwrite: bool = typer.Option(False, help="Replace --out if it is complete."),
) -> None:
    """Turn raw logs into Parquet files with a schema, ready to train on."""
    from rowhaul._environment import return_freed_memory
    from rowhaul.cli.progress import console, share_bar, told_when_interrupted
    from rowhaul.data.preparing import prepare as prepare_data

    return_freed_memory()
    with told_when_interrupted("run the same command again to go on"), share_bar() as bar:
        task = bar.add_task("preparing", total=1.0, note="")
        report = prepare_data(
            inputs,
            out,
            format,
            schema=schema,
            positive_from=positive_from,
            time_order=time_order,
            on_bad_line=on_bad_line,
            test_share=test_share,
            check_collisions=check_collisions,
            overwrite=overwrite,
            progress=lambda rows, share: bar.update(task, completed=share, note=f"{rows:,} rows"),
        )
        bar.update(task, completed=1.0)
    lines = [
        f"{report.rows:,} rows in {out} ({report.test_rows:,} of them in test/), "
        f"{report.bytes / 2**20:,.1f} MiB, {report.seconds:,.1f} s"
    ]
    if report.resumed_rows:
        lines.append(f"resumed: {report.resumed_rows:,} rows were there already")
    if report.bad_lines:
        lines.append(f"skipped {report.bad_lines:,} bad line{'s' if report.bad_lines > 1 else ''}:")
        lines += [f"  {example}" for example in report.bad_line_examples]
    if report.collisions is not None:
        found = {table: pairs for table, pairs in report.collisions.items() if pairs}
        lines.append(f"strings that share a key: {found or 'none'}")
    lines.append(f"Next: rowhaul train --data '{out}/*.parquet' --out run/")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
