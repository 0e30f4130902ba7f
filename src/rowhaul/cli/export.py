"""`rowhaul export`, also as `rowhaul ckpt export`: a trained model in files that other tools read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul.cli.checks import REDIS
from rowhaul.cli.console import bytes_text, console, counted, plain_table, say, typed
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar
from rowhaul.cli.renamed import TO, out_or_to

if TYPE_CHECKING:
    from rowhaul.checkpoint import CheckpointReader
    from rowhaul.export.export import Exported
    from rowhaul.export.redis import RedisExport
    from rowhaul.export.serving.folder import ServedExport


def export(
    path: str = typer.Argument(
        ..., help="The --out of a `train`: its newest checkpoint; or a checkpoint, folder or URL."
    ),
    out: str | None = typer.Option(None, "--out", help="New folder to write; or redis://HOST/NUMBER."),
    dense: list[str] = typer.Option(
        [],
        "--dense",
        help="Write a folder that `rowhaul serve` takes: all rows in one file, the rest of the model as a "
        "graph, onnx or pt2 (torch.export); repeatable.",
    ),
    format: str = typer.Option("parquet", "--format", help="Of the tables: parquet, safetensors or npz."),
    table: list[str] = typer.Option([], "--table", help="Export only this table; repeatable."),
    state: bool = typer.Option(False, "--state", help="Include the optimizer state of every row."),
    whole: bool = typer.Option(
        False, "--whole", help="Write pruned rows in full, with zeros where pruned, instead of stored chunks."
    ),
    to: str | None = TO,
    as_json: bool = AS_JSON,
) -> None:
    """Write tables as keys and vectors, and dense weights as safetensors; read all back and compare.

    Pruned tables export only stored chunks. `rowhaul evaluate` and `predict` take the folder like a run. With
    --dense: a folder to serve from, whose logits are compared with the model's own.
    """
    from rowhaul.errors import ConfigError
    from rowhaul.train.run_folder import open_saved

    place = out_or_to("export", out, to)
    if dense and (format != "parquet" or table or state or whole):
        raise ConfigError(
            "--dense writes a folder to serve from, with all rows and without state; --format, --table, "
            "--state and --whole are for tables in files of their own: export twice"
        )
    is_redis = place.startswith(REDIS)
    if is_redis and (dense or format != "parquet" or state):
        raise ConfigError("rows in Redis are whole vectors; leave out --dense, --format and --state")
    reader = open_saved(path)
    made: Any
    show: Callable[[CheckpointReader, Any], None]
    if is_redis:
        made, show = _export_to_redis(reader, place, table), _print_redis
    elif dense:
        made, show = _export_served(reader, Path(place), dense), _print_served
    else:
        made, show = _export_tables(reader, Path(place), format, table, state, whole), _print_tables
    if as_json:
        print_json(made)
    else:
        show(reader, made)


def _export_served(reader: CheckpointReader, out: Path, dense: list[str]) -> ServedExport:
    from rowhaul.export.serving.folder import export_served

    with progress_bar("exporting", "nothing was written") as progress:
        return export_served(reader, out, dense=dense, progress=progress)


def _print_served(reader: CheckpointReader, made: ServedExport) -> None:
    shown = plain_table("file", "size")
    for name, size in made.sizes.items():
        shown.add_row(name, bytes_text(size))
    console.print(shown, highlight=False)
    found = made.comparison
    largest = ", ".join(f"{value:.1e} ({kind})" for kind, value in found.differences.items())
    samples = f"{found.num_samples:,} samples {'of the run' if found.is_real else 'made from trained ids'}"
    say(
        f"Logits of {samples}, {found.num_unseen:,} unseen ids among them, compared with predict: the "
        f"largest difference is {largest}."
    )
    say(
        f"Exported {reader.path} to {made.path}: {counted(sum(made.num_rows.values()), 'row')} of "
        f"{counted(len(made.num_rows), 'table')}. Serve it: rowhaul serve {typed(made.path)} --port 8080"
    )


def _export_to_redis(reader: CheckpointReader, url: str, tables: list[str]) -> RedisExport:
    from rowhaul.export.redis import export_to_redis

    with progress_bar("exporting", "rows written so far stay in Redis") as progress:
        return export_to_redis(reader, url, tables=tables, progress=progress)


def _print_redis(reader: CheckpointReader, made: RedisExport) -> None:
    say(
        f"Exported {reader.path} to Redis: {counted(made.num_rows, 'row')} of "
        f"{counted(len(made.tables), 'table')} under {made.prefix}, read back and equal to the bit. "
        f"GET {made.prefix}about says how to read them."
    )


def _export_tables(
    reader: CheckpointReader, out: Path, format: str, tables: list[str], state: bool, whole: bool
) -> Exported:
    from rowhaul.export.export import export as export_checkpoint

    with progress_bar("exporting", "nothing was written") as progress:
        return export_checkpoint(
            reader,
            out,
            format=format,
            tables=tables,
            with_state=state,
            whole_rows=whole,
            progress=lambda done, total: progress(done // 2, total // 2),  # written, then read back
        )


def _print_tables(reader: CheckpointReader, made: Exported) -> None:
    layouts = [(one, one.file_layout()) for one in made.tables]
    titles = list(dict.fromkeys(title for _, layout in layouts for title in layout.cells()))
    shown = plain_table("table", "rows", "dim", *titles, "state", "type", "size", "file")
    for one, layout in layouts:
        cells = (layout.cells().get(title, "") for title in titles)
        numbers = (str(one.state_width), one.dtype, bytes_text(one.bytes))
        shown.add_row(one.name, f"{one.num_rows:,}", str(one.dim), *cells, *numbers, one.file)
    console.print(shown, highlight=False)
    left_out = sum(layout.rows_left_out for _, layout in layouts)
    if left_out:
        say(
            f"{counted(left_out, 'more row')} without any stored chunk left out: like every key that is not "
            "in the export, they read as zeros."
        )
    weights = f" and {counted(len(made.dense), 'dense weight')}" if made.dense else ""
    say(
        f"Exported {reader.path} to {made.path}: {counted(len(made.tables), 'table')}{weights}, read back "
        f"and equal to the bit. {made.path}/README.md explains how to read them."
    )
