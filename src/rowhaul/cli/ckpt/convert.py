"""`rowhaul ckpt convert`: a checkpoint with its rows in fewer, or more, bits."""

from __future__ import annotations

import typer

from rowhaul.cli.ckpt.merge import into_folder
from rowhaul.cli.console import bytes_text, say, typed
from rowhaul.cli.json_output import AS_JSON, print_json
from rowhaul.cli.progress import progress_bar


def convert(
    path: str = typer.Argument(..., metavar="RUN_OR_CHECKPOINT", help="A run, or a checkpoint of one."),
    row_dtype: str = typer.Option(..., "--row-dtype", help="float32, bfloat16, float16 or int8."),
    out: str = typer.Option(
        ..., "--out", help="New folder: a run if it is of a run, else a checkpoint; a URL: a checkpoint."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Write a checkpoint with the values of its rows in another type.

    Dense weights and optimizer state stay as they are.
    """
    from dataclasses import replace

    from rowhaul.checkpoint import as_place
    from rowhaul.checkpoint.converting import convert as convert_checkpoint
    from rowhaul.train.run_folder import facts_for_another_run, open_saved, run_facts, saved_settings

    reader, place = open_saved(path), as_place(out)
    settings, seed = saved_settings(reader), 0
    facts = facts_for_another_run(reader.facts)
    config = None
    if settings is not None:
        config = replace(settings[0], row_dtype=row_dtype)  # complains before anything is written
        facts, seed = {**facts, **run_facts(config, settings[1])}, config.seed
    with progress_bar("converting", "nothing was written") as progress:
        made = into_folder(
            reader,
            place,
            lambda to: convert_checkpoint(reader, to, row_dtype, seed=seed, facts=facts, progress=progress),
            config,
        )
    before, after = (sum(one.file_bytes.values()) for one in (reader, made[0]))
    rows = sum(table.num_rows for table in reader.tables.values())
    if as_json:
        numbers = {"rows": rows, "row_dtype": row_dtype, "bytes_before": before, "bytes": after}
        print_json({"path": made[1], **numbers})
        return
    say(
        f"{rows:,} rows, now in {row_dtype}: {bytes_text(before)} became {bytes_text(after)}. "
        f"Converted into {made[1]}"
    )
    if made[1] != place:
        shown = typed(out)
        say(f"Next: rowhaul evaluate {shown} --data …, or rowhaul train --resume --out {shown}")
