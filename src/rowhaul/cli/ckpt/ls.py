"""`rowhaul ckpt ls`: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rowhaul.cli.console import bytes_text, console, counted, plain_table, say
from rowhaul.cli.progress import exit_when_interrupted, share_bar
from rowhaul.cli.run import AS_JSON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rowhaul.checkpoint import CheckpointReader
    from rowhaul.checkpoint.describing import Contents, TableContents

EXIT_DAMAGED = 2
CHECKPOINT = typer.Argument(..., help="A checkpoint, or the --out of a `train`: its newest one.")


def ls(
    path: Path = CHECKPOINT,
    verify: bool = typer.Option(False, "--verify", help="Read every file and compare its checksum."),
    as_json: bool = AS_JSON,
) -> None:
    """List what a checkpoint holds: step, model, tables, tensors, the layout of a cluster."""
    import json
    from dataclasses import asdict

    from rowhaul.checkpoint.describing import describe
    from rowhaul.checkpoint.opening import beside, open_checkpoint

    reader = open_checkpoint(path)
    contents = describe(reader)
    others = [str(one) for one in beside(reader) if one != reader.path]
    damaged = _verify(reader, as_json) if verify else None
    if as_json:
        found = {"verified": damaged is not None, "damaged": damaged or {}}
        typer.echo(json.dumps({**asdict(contents), "other_checkpoints": others, **found}))
    else:
        _print(contents, others, damaged)
    if damaged:
        raise typer.Exit(EXIT_DAMAGED)


def _verify(reader: CheckpointReader, quiet: bool) -> dict[str, str]:
    from rowhaul.checkpoint.describing import damaged_files

    with exit_when_interrupted("not all files were verified"), share_bar(quiet) as bar:
        task = bar.add_task("verifying", total=1.0, note="")
        return damaged_files(reader, lambda done, total: bar.update(task, completed=done, total=total))


def _print(contents: Contents, others: list[str], damaged: dict[str, str] | None) -> None:
    facts = [f"step {contents.step:,}"] if contents.step is not None else []
    facts += [f"{contents.samples:,} samples"] if contents.samples is not None else []
    facts += [f"model {contents.model}"] if contents.model else []
    facts += [f"rows by {contents.row_optimizer}"] if contents.row_optimizer else []
    cut = {one.chunks for one in contents.tables if one.chunks is not None}
    facts += [f"pruned, {max(cut)} chunks a row"] if cut else []
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


def _held(table: TableContents) -> tuple[str, str, str]:
    """Stored columns, stored chunks, and their share of all chunks of these rows."""
    columns = "-" if table.columns is None else str(table.columns)
    if table.chunks_there is None or table.chunks is None:
        return columns, "?", "?"
    share = table.chunks_there / max(table.rows * table.chunks, 1)
    return columns, f"{table.chunks_there:,}", f"{share:.1%}"


def _whole(tables: Sequence[TableContents]) -> tuple[str, str, str]:
    there = [one.chunks_there for one in tables]
    known = [one for one in there if one is not None]
    if len(known) < len(there):
        return "", "?", "?"
    total = sum(one.rows * (one.chunks or 0) for one in tables)
    return "", f"{sum(known):,}", f"{sum(known) / max(total, 1):.1%}"


def _tables(contents: Contents) -> RenderableType:
    is_pruned = any(one.chunks is not None for one in contents.tables)
    kinds = ("columns", "stored chunks", "of all") if is_pruned else ("state",)
    table = plain_table("table", "rows", "dim", *kinds, "type", "size", "files")
    for one in contents.tables:
        kind = _held(one) if is_pruned else (str(one.state_width),)
        numbers = (f"{one.rows:,}", str(one.dim), *kind, one.dtype)
        table.add_row(one.name, *numbers, bytes_text(one.bytes), f"{one.files:,}")
    if len(contents.tables) > 1:
        rows, size = sum(one.rows for one in contents.tables), sum(one.bytes for one in contents.tables)
        files = sum(one.files for one in contents.tables)
        whole = _whole(contents.tables) if is_pruned else ("",)
        table.add_row("all", f"{rows:,}", "", *whole, "", bytes_text(size), f"{files:,}", style="bold")
    return table
