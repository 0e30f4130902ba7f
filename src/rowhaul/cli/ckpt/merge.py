"""`rowhaul ckpt merge`: several checkpoints into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rowhaul.cli.console import console, plain_table, say
from rowhaul.cli.progress import progress_bar
from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowhaul.checkpoint import CheckpointReader
    from rowhaul.checkpoint.merging import Merged
    from rowhaul.checkpoint.progress import Progress


def merge(
    paths: list[Path] = typer.Argument(
        ..., metavar="A B ...", help="Checkpoints or runs; the last one that has a row wins."
    ),
    to: Path = typer.Option(
        ..., "--to", help="New folder: a run if the last one is of a run, else a checkpoint."
    ),
) -> None:
    """Merge the tables and rows of checkpoints; compact a single one into fewer files.

    Later checkpoints win: each row, and all dense weights, are taken from the last one that has them.
    """
    from rowhaul.checkpoint.opening import open_checkpoint

    sources = [open_checkpoint(path) for path in paths]
    with progress_bar("merging", "nothing was written") as progress:  # written, then read back
        merged = merge_into_folder(sources, to, lambda done, total: progress(done // 2, total // 2))
    _print(merged, sources, to)


def merge_into_folder(sources: Sequence[CheckpointReader], to: Path, progress: Progress) -> Merged:
    """Merge into a checkpoint, or into a run with one checkpoint if the last source is of a run."""
    import shutil
    from dataclasses import replace

    from rowhaul._files import temporary_beside, whole
    from rowhaul.checkpoint.layout import step_folder
    from rowhaul.checkpoint.merging import main_source
    from rowhaul.checkpoint.merging import merge as merge_checkpoints
    from rowhaul.checkpoint.opening import run_of
    from rowhaul.data.schema import SCHEMA_FILE
    from rowhaul.train.run_data import DATA_FILE
    from rowhaul.train.run_folder import CHECKPOINTS, CONFIG_FILE

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} exists and is not empty; choose another folder for the result")
    last = main_source(sources)
    run = run_of(last)
    if run is None or not (run / CONFIG_FILE).is_file() or to.resolve().parent.name == CHECKPOINTS:
        return merge_checkpoints(sources, to, progress)
    place = Path(CHECKPOINTS) / step_folder(last.facts["step"])
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(to), ignore_errors=True)  # what a killed merge left
    with whole(to) as folder:
        merged = merge_checkpoints(sources, folder / place, progress)
        for name in (CONFIG_FILE, SCHEMA_FILE):
            shutil.copyfile(run / name, folder / name)
        if (run / DATA_FILE).is_file():
            shutil.copyfile(run / DATA_FILE, folder / DATA_FILE)
    return replace(merged, path=to / place)


def _print(merged: Merged, sources: Sequence[CheckpointReader], to: Path) -> None:
    numbers = range(1, len(sources) + 1)
    origins = [f"from {number}" for number in numbers] if len(sources) > 1 else []
    table = plain_table("table", "rows", *origins, "replaced", "files before", "files")
    for one in merged.tables:
        counts = [f"{count:,}" for count in one.rows_from] if len(sources) > 1 else []
        files = (f"{one.files_before:,}", f"{one.files:,}")
        table.add_row(one.name, f"{one.rows:,}", *counts, f"{one.replaced:,}", *files)
    lines = [f"{number}: {reader.path}" for number, reader in zip(numbers, sources, strict=True)]
    say("\n".join(lines))
    console.print(table, highlight=False)
    dense = f"Dense weights and counters are from {merged.dense_from}. " if merged.dense_from else ""
    rule = "Rows in several checkpoints were taken from the last one. " if len(sources) > 1 else ""
    rule += f"{merged.left_out} " if merged.left_out else ""
    text = f"{rule}{dense}Merged into {merged.path}"
    if merged.path != to:
        text += f"\nNext: rowhaul evaluate {to} --data …, or rowhaul train --resume --out {to}"
    say(text)
