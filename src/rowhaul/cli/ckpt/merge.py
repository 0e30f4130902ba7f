"""`rowhaul ckpt merge`: several checkpoints into one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from rowhaul.cli.console import console, plain_table, say, typed
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar
from rowhaul.cli.renamed import TO, out_or_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rowhaul.checkpoint import CheckpointReader, Place
    from rowhaul.checkpoint.merging import Merged
    from rowhaul.checkpoint.progress import Progress
    from rowhaul.train import TrainConfig

Made = TypeVar("Made")


def merge(
    paths: list[str] = typer.Argument(
        ...,
        metavar="A B ...",
        help="Checkpoints (folders or URLs) or runs; the last one that has a row wins.",
    ),
    out: str | None = typer.Option(
        None,
        "--out",
        help="New folder: a run if the last one is of a run, else a checkpoint; a URL: a checkpoint.",
    ),
    to: str | None = TO,
    as_json: bool = AS_JSON,
) -> None:
    """Merge the tables and rows of checkpoints; compact a single one into fewer files.

    Later checkpoints win: each row, and all dense weights, are taken from the last one that has them.
    """
    from rowhaul.checkpoint import as_place
    from rowhaul.train.run_folder import open_saved

    place = as_place(out_or_to("ckpt merge", out, to))
    sources = [open_saved(path) for path in paths]
    with progress_bar("merging", "nothing was written") as progress:  # written, then read back
        merged = merge_into_folder(sources, place, lambda done, total: progress(done // 2, total // 2))
    if as_json:
        print_json(merged)
    else:
        _print(merged, sources, place)


def merge_into_folder(sources: Sequence[CheckpointReader], to: Place, progress: Progress) -> Merged:
    """Merge into a checkpoint, or into a run with one checkpoint if the last source is of a run."""
    from dataclasses import replace

    from rowhaul.checkpoint.merging import main_source
    from rowhaul.checkpoint.merging import merge as merge_checkpoints
    from rowhaul.train.run_folder import facts_for_another_run

    main = main_source(sources)  # whose facts the result gets
    main.facts = facts_for_another_run(main.facts)
    merged, path = into_folder(main, to, lambda place: merge_checkpoints(sources, place, progress))
    return replace(merged, path=path)


def into_folder(
    source: CheckpointReader,
    to: Place,
    make: Callable[[Place], Made],
    config: TrainConfig | None = None,
) -> tuple[Made, Place]:
    """Make a checkpoint, or a run with one checkpoint if the source is of a run; also return where it is.

    ``config`` is that of the new run, instead of the source's.
    """
    import shutil
    from dataclasses import replace

    from rowhaul._files import check_new_folder, temporary_beside, whole
    from rowhaul.checkpoint.layout import step_folder
    from rowhaul.checkpoint.location import local_path
    from rowhaul.checkpoint.opening import run_of
    from rowhaul.data.schema import SCHEMA_FILE
    from rowhaul.train.run_data import DATA_FILE
    from rowhaul.train.run_folder import CHECKPOINTS, CONFIG_FILE, saved_settings

    path = local_path(to)
    if path is not None:
        check_new_folder(path, "the result")
    settings = saved_settings(source)
    if path is None or settings is None or path.resolve().parent.name == CHECKPOINTS:
        return make(to), to
    place = Path(CHECKPOINTS) / step_folder(source.facts["step"])
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(path), ignore_errors=True)  # what a killed command left
    with whole(path) as folder:
        made = make(folder / place)
        config = config or settings[0]
        config = config if not config.checkpoints else replace(config, checkpoints="")  # they are here now
        config.write(folder / CONFIG_FILE)
        settings[1].write(folder / SCHEMA_FILE)
        run = run_of(source)
        if run is not None and (run / DATA_FILE).is_file():
            shutil.copyfile(run / DATA_FILE, folder / DATA_FILE)
    return made, path / place


def _print(merged: Merged, sources: Sequence[CheckpointReader], to: Place) -> None:
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
        text += f"\nNext: rowhaul evaluate {typed(to)} --data …, or rowhaul train --resume --out {typed(to)}"
    say(text)
