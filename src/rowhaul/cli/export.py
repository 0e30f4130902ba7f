"""`rowhaul export`, also as `rowhaul ckpt export`: a trained model in files that other tools read."""

from __future__ import annotations

from pathlib import Path

import typer

from rowhaul.cli.console import bytes_text, console, counted, plain_table, say
from rowhaul.cli.progress import progress_bar


def export(
    path: str = typer.Argument(
        ..., help="The --out of a `train`: its newest checkpoint; or a checkpoint, folder or URL."
    ),
    to: Path = typer.Option(..., "--to", help="New folder to write."),
    format: str = typer.Option("parquet", "--format", help="Of the tables: parquet, safetensors or npz."),
    table: list[str] = typer.Option([], "--table", help="Export only this table; repeatable."),
    state: bool = typer.Option(False, "--state", help="Include the optimizer state of every row."),
    whole: bool = typer.Option(
        False, "--whole", help="Write pruned rows in full, with zeros where pruned, instead of stored chunks."
    ),
) -> None:
    """Write tables as keys and vectors, and dense weights as safetensors; read all back and compare.

    Pruned tables export only stored chunks. `rowhaul evaluate` and `predict` take the folder like a run.
    """
    from rowhaul.export.export import export as export_checkpoint
    from rowhaul.train.run_folder import open_saved

    reader = open_saved(path)
    with progress_bar("exporting", "nothing was written") as progress:
        made = export_checkpoint(
            reader,
            to,
            format=format,
            tables=table,
            with_state=state,
            whole_rows=whole,
            progress=lambda done, total: progress(done // 2, total // 2),  # written, then read back
        )
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
    dense = f" and {counted(len(made.dense), 'dense weight')}" if made.dense else ""
    say(
        f"Exported {reader.path} to {to}: {counted(len(made.tables), 'table')}{dense}, read back and equal "
        f"to the bit. {to}/README.md explains how to read them."
    )
