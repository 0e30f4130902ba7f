"""`rowhaul prepare`: raw logs to a data folder."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import bytes_text, counted, say, typed
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar


def prepare(
    inputs: list[Path] = typer.Argument(
        ..., help="Raw log files, plain or .gz; a zip or folder for some formats."
    ),
    format: str = typer.Option(
        ...,
        "--format",
        help="criteo, criteo-tb, criteo-search, avazu, movielens, taobao, userbehavior, csv or parquet.",
    ),
    out: Path = typer.Option(..., "--out", help="Data folder to write; an interrupted one is resumed."),
    schema: Path | None = typer.Option(None, "--schema", help="Schema file, for csv and parquet."),
    positive_from: float | None = typer.Option(
        None, help="Lowest rating that counts as a click (movielens; default 4)."
    ),
    time_order: bool | None = typer.Option(
        None,
        "--time-order/--file-order",
        help="Sort by time (default where the files are not sorted) or keep the order.",
    ),
    history: int | None = typer.Option(
        None, help="Put each user's last events, at most so many, beside an event (movielens, userbehavior)."
    ),
    history_of: str | None = typer.Option(
        None, help="Events that enter histories: all (default) or positive."
    ),
    on_bad_line: str = typer.Option("error", help="What to do with a malformed line: error or skip."),
    test_share: float | None = typer.Option(
        None,
        help="Share of the rows, the last ones, to put into test/ (default 0.1; 0 of rows without a label).",
    ),
    check_collisions: bool = typer.Option(
        False, help="Check that no two strings share a key (another pass)."
    ),
    overwrite: bool = typer.Option(False, help="Replace --out if it is complete."),
    as_json: bool = AS_JSON,
) -> None:
    """Turn raw logs into Parquet files with a schema, ready to train on."""
    from rowhaul._environment import return_freed_memory
    from rowhaul.data.preparing import prepare as prepare_data

    return_freed_memory()
    with progress_bar("preparing", "run the same command again to continue", as_share=True) as progress:
        report = prepare_data(
            inputs,
            out,
            format,
            schema=schema,
            positive_from=positive_from,
            time_order=time_order,
            history=history,
            history_of=history_of,
            on_bad_line=on_bad_line,
            test_share=test_share,
            check_collisions=check_collisions,
            overwrite=overwrite,
            progress=lambda rows, share: progress(share, 1.0, note=f"{rows:,} rows"),
        )
        progress(1.0, 1.0)
    if as_json:
        print_json(report)
        return
    say(
        f"{report.rows:,} rows in {out} ({report.test_rows:,} of them in test/), "
        f"{bytes_text(report.bytes)}, {report.seconds:,.1f} s"
    )
    for kind, what in (("integer", "integers"), ("string", "text, which is hashed")):
        if columns := [name for name, guessed in report.guessed_types.items() if guessed == kind]:
            say(f"ids taken for {what}: {', '.join(columns)} (to choose: `type` in the schema)")
    if report.resumed_rows:
        say(f"resumed: {report.resumed_rows:,} rows were there already")
    if report.bad_lines:
        say("\n  ".join([f"skipped {counted(report.bad_lines, 'bad line')}:", *report.bad_line_examples]))
    if report.collisions is not None:
        found = {table: pairs for table, pairs in report.collisions.items() if pairs}
        say(f"strings that share a key: {found or 'none'}")
    if report.labelled:
        say(f"Next: rowhaul train --data {typed(out / '*.parquet')} --out run/")
    else:
        say(f"Next: rowhaul predict RUN --data {typed(out / '*.parquet')} --out scores.parquet")
