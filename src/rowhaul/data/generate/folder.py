"""A generated log as a data folder, ready to train on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowhaul.data.folder.writer import Chunk, FolderWriter, Progress
from rowhaul.data.generate.generator import LogGenerator


def generate_folder(
    preset: str,
    rows: int,
    out: str | Path,
    *,
    seed: int = 0,
    rare_signal: bool = False,
    conversions: bool = False,
    test_share: float = 0.1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a log of ``rows`` samples to ``out``; an interrupted one is resumed.

    Returns what is known of its labels, which the manifest keeps under ``bayes``: the base rate and
    the AUC, log loss and normalised entropy that no model can beat.
    """
    generator = LogGenerator(preset, rows, seed, rare_signal=rare_signal, conversions=conversions)
    made_by = {"command": "generate", "preset": preset, "rows": rows, "seed": seed}
    if rare_signal:
        made_by["rare_signal"] = True
    if conversions:
        made_by["conversions"] = True
    with FolderWriter(out, generator.schema, made_by, test_share=test_share, overwrite=overwrite) as writer:
        start = writer.position["row"] if writer.position else 0
        writer.write(_chunks(generator, start), progress)
        bayes = asdict(generator.bayes)
        writer.finish({"bayes": bayes})
    return bayes


def _chunks(generator: LogGenerator, start: int) -> Iterator[Chunk]:
    done = start
    for batch in generator.batches(start):
        done += batch.num_rows
        yield Chunk(batch, {"row": done}, done / generator.rows)
