"""`rowhaul export`, also as `rowhaul ckpt export`: a trained model in files that other tools read."""

from __future__ import annotations

from pathlib import Path

import typer


def export(
    path: Path = typer.Argument(..., help="The --out of a `train`: its newest checkpoint; or a checkpoint."),
    to: Path = typer.Option(..., "--to", help="New folder to write."),
    format: str = typer.Option("parquet", "--format", help="Of the tables: parquet, safetensors or npz."),
    table: list[str] = typer.Option([], "--table", help="Export this table only; repeatable."),
    state: bool = typer.Option(False, "--state", help="With the optimizer's state of every row."),
    whole: bool = typer.Option(
        False, "--whole", help="Pruned rows with zeros where pruned, instead of what there is alone."
    ),
) -> None:
    """Write tables as keys and vectors, and dense weights as safetensors; all is read back and compared.

    Of pruned rows the chunks that there are. `rowhaul evaluate` and `predict` take the folder like a run.
    """
    from rowhaul.checkpoint.opening import open_checkpoint
    from rowhaul.cli.progress import console, counting_bar, told_when_interrupted
    from rowhaul.cli.size_text import bytes_text, counted, plain_table
    from rowhaul.export.export import export as export_checkpoint

    reader = open_checkpoint(path)
    with told_when_interrupted("nothing was written"), counting_bar() as bar:
        task = bar.add_task("exporting", total=0, note="")
        made = export_checkpoint(
            reader,
            to,
            format=format,
            tables=table,
            with_state=state,
            whole_rows=whole,
            progress=lambda done, total: bar.update(task, completed=done // 2, total=total // 2),
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
        console.print(
            f"{counted(left_out, 'row')} more hold nothing and were left out: they read as zeros, like any "
            "key that is not there.",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    dense = f" and {counted(len(made.dense), 'dense weight')}" if made.dense else ""
    console.print(
        f"Exported {reader.path} to {to}: {counted(len(made.tables), 'table')}{dense}, read back and equal "
        f"to the bit. {to}/README.md says how to read them.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
