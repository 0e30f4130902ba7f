"""`rowhaul ckpt ls`: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rowhaul.cli.console import bytes_text, console, counted, plain_table, say
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rowhaul.checkpoint.describing import Contents

EXIT_DAMAGED = 2
CHECKPOINT = typer.Argument(..., help="A checkpoint (folder or URL), or the --out of a `train`: its newest.")


def ls(
    path: str = CHECKPOINT,
    verify: bool = typer.Option(False, "--verify", help="Read every file and compare its checksum."),
    as_json: bool = AS_JSON,
) -> None:
    """List what a checkpoint holds: step, model, tables, tensors, the layout of a cluster."""
    from dataclasses import asdict

    from rowhaul.checkpoint.describing import damaged_files, describe
    from rowhaul.checkpoint.opening import beside
    from rowhaul.train.run_folder import open_saved

    reader = open_saved(path)
    contents = describe(reader)
    others = [str(one) for one in beside(reader) if one != reader.path]
    damaged = None
    if verify:
        interrupted = "not all files were verified"
        with progress_bar("verifying", interrupted, as_share=True) as progress:
            damaged = damaged_files(reader, progress)
    if as_json:
        found = {"verified": damaged is not None, "damaged": damaged or {}}
        tables = [one.to_dict() for one in contents.tables]
        print_json({**asdict(contents), "tables": tables, "other_checkpoints": others, **found})
    else:
        _print(contents, others, damaged)
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)


def _print(contents: Contents, others: list[str], damaged: dict[str, str] | None) -> None:
    facts = [f"step {contents.step:,}"] if contents.step is not None else []
    facts += [f"{contents.samples:,} samples"] if contents.samples is not None else []
    facts += [f"model {contents.model}"] if contents.model else []
    facts += [f"rows by {contents.row_optimizer}"] if contents.row_optimizer else []
    facts += dict.fromkeys(one.note for one in contents.tables if one.note)
    say(contents.path)
    say("; ".join([*facts, f"{bytes_text(contents.bytes)} in {counted(contents.files, 'file')}"]) + "\n")
    console.print(_tables(contents), highlight=False)
    if contents.tensors:
        sizes = ", ".join(f"{group} {bytes_text(size)}" for group, size in contents.tensors.items())
        say(f"\ntensors: {sizes}")
    if contents.layout:
        say(
            f"layout: {bytes_text(sum(contents.layout.values()))} in {counted(len(contents.layout), 'file')} "
            "of the cluster that saved it; other clusters ignore them"
        )
    if others:
        say("other checkpoints: " + ", ".join(Path(one).name for one in others))
    if damaged:
        say(f"\n{counted(len(damaged), 'file')} of {contents.files:,} damaged:")
        for reason in damaged.values():
            say(f"  {reason}")
    elif damaged is not None:
        say(f"\nverified: all {counted(contents.files, 'file')} match their checksums")


def _tables(contents: Contents) -> RenderableType:
    from rowhaul.store.row_format import row_format

    formats = {one.format: row_format(one.format) for one in contents.tables}
    all_cells = (formats[one.format].cells([one]) for one in contents.tables)
    titles = list(dict.fromkeys(title for cells in all_cells for title in cells))
    table = plain_table("table", "rows", "dim", *titles, "type", "size", "files")
    for one in contents.tables:
        cells = formats[one.format].cells([one])
        numbers = (f"{one.rows:,}", str(one.dim), *(cells.get(title, "") for title in titles), one.dtype)
        table.add_row(one.name, *numbers, bytes_text(one.bytes), f"{one.files:,}")
    if len(contents.tables) > 1:
        rows, size, files = (
            sum(getattr(t, what) for t in contents.tables) for what in ("rows", "bytes", "files")
        )
        cells = formats[contents.tables[0].format].cells(contents.tables) if len(formats) == 1 else {}
        sums = (cells.get(title, "") for title in titles)
        table.add_row("all", f"{rows:,}", "", *sums, "", bytes_text(size), f"{files:,}", style="bold")
    return table
