"""From raw logs to a prepared data folder: Parquet files, a schema and a manifest.

Reading (with decompression), parsing and writing run in separate threads with short queues between them, so
memory does not grow with the rows. To resume an interrupted run, run it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rowhaul.data.collisions import find_collisions
from rowhaul.data.folder.writer import SCRATCH_FOLDER, FolderWriter, Progress
from rowhaul.data.formats import Options, Source, open_format
from rowhaul.data.formats.histories import HistoryOptions, WithHistories
from rowhaul.data.formats.source import TextSource
from rowhaul.data.formats.time_order import TimeOrdered
from rowhaul.data.prefetch import prefetch
from rowhaul.data.schema import Schema
from rowhaul.data.text.reader import BadLines
from rowhaul.errors import ConfigError, DataError

_CHUNKS_AHEAD = 1
_TEST_SHARE = 0.1


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` did."""

    folder: Path
    rows: int
    test_rows: int
    files: int
    bytes: int
    bad_lines: int
    bad_line_examples: tuple[str, ...]
    collisions: dict[str, int] | None  # strings that share a key, by table; None: not checked
    guessed_types: dict[str, str]  # of id columns whose type the schema leaves open
    resumed_rows: int  # written by an earlier run
    seconds: float
    labelled: bool  # whether there is something to train on


def prepare(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    format: str,
    *,
    schema: str | Path | Schema | None = None,
    positive_from: float | None = None,
    time_order: bool | None = None,
    history: int | None = None,
    history_of: str | None = None,
    on_bad_line: str = "error",
    test_share: float | None = None,
    check_collisions: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PrepareReport:
    """Turn raw logs into a data folder that `train` reads.

    Args:
        inputs: the raw files in order; for some formats one folder or archive.
        out: the folder to write.
        format: a name in `rowhaul.data.formats.FORMATS`.
        schema: what the columns mean, for the formats csv and parquet.
        positive_from: lowest rating that counts as 1, for the format movielens (default 4).
        time_order: sort by time (the default) or keep the order of the file, for the formats that
            have a time and are not in its order.
        history: put the ids of a user's last events, at most so many, beside each event, for the formats
            movielens and userbehavior; only events of earlier times are in it.
        history_of: which events enter histories: ``all`` (the default) or ``positive``, those with label 1.
        on_bad_line: "error" stops at the first, "skip" counts them.
        test_share: share of the rows, the last ones, to put into ``test/``: 0.1, or 0 of rows without a
            label, which are for `predict`.
        check_collisions: read the input again to check that no two strings share a key.
        overwrite: replace a folder that exists, unless the same command has left it unfinished.
        progress: called with the rows written and the share of the input used.
    """
    started = time.monotonic()
    if on_bad_line not in ("error", "skip"):
        raise ConfigError(f"on_bad_line is {on_bad_line!r}; error or skip is needed")
    paths = [Path(one).expanduser() for one in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    options = Options(
        schema=schema if isinstance(schema, Schema) or schema is None else Schema.read(schema),
        positive_from=positive_from,
        time_order=time_order,
        history=history,
        history_of=history_of,
    )
    if options.schema is not None and options.schema.time is not None:
        raise DataError(
            f"`time: {options.schema.time.name}` of the schema is read from Parquet files and streams that "
            "are trained on; prepare does not keep such a column, so leave it out of the schema"
        )
    if len({path.resolve() for path in paths}) < len(paths):
        raise DataError(f"an input is named twice: {', '.join(map(str, paths))}; name each file once")
    opened = open_format(format, paths, options)
    ordered, source = _in_order(opened, options, Path(out).expanduser() / SCRATCH_FOLDER)
    schema_written = ordered.schema if isinstance(ordered, WithHistories) else source.schema
    if test_share is None:
        test_share = _TEST_SHARE if schema_written.tasks else 0.0
    made_by = {
        "command": "prepare",
        "format": format,
        "inputs": [str(path) for path in paths],
        "schema": options.schema.to_dict() if options.schema else None,
        "positive_from": positive_from,
        "time_order": time_order,
    }
    if history is not None:
        made_by |= {"history": history, "history_of": history_of}
    if opened.guessed_types:  # earlier versions took them for text: do not continue what those began
        made_by["id_types"] = dict(opened.guessed_types)
    for path in source.files:
        if Path(out).expanduser().resolve() in path.resolve().parents:
            raise DataError(f"{path} is inside the output folder {out}; choose another folder")
    fingerprints = [_fingerprint(path) for path in source.files]
    with FolderWriter(
        out, schema_written, made_by, inputs=fingerprints, test_share=test_share, overwrite=overwrite
    ) as writer:
        resumed_rows = writer.rows
        bad_lines = BadLines.at(writer.position, skip=on_bad_line == "skip")
        chunks = prefetch(ordered.chunks(writer.position, bad_lines), _CHUNKS_AHEAD)
        with closing(chunks):  # ends its thread before anything else
            writer.write(chunks, progress)
        collisions = find_collisions(source, writer.folder / SCRATCH_FOLDER) if check_collisions else None
        bad_lines = BadLines.at(writer.position, bad_lines.skip)
        manifest = writer.finish(
            {"on_bad_line": on_bad_line, **bad_lines.to_dict(), "collisions": collisions}
        )
    return PrepareReport(
        folder=writer.folder,
        rows=manifest["rows"],
        test_rows=manifest["rows"] - manifest["train_rows"],
        files=len(manifest["files"]),
        bytes=manifest["bytes"],
        bad_lines=bad_lines.count,
        bad_line_examples=tuple(bad_lines.examples),
        collisions=collisions,
        guessed_types=dict(source.guessed_types),
        resumed_rows=resumed_rows,
        seconds=time.monotonic() - started,
        labelled=bool(schema_written.tasks),
    )


def _in_order(
    source: Source, options: Options, scratch: Path
) -> tuple[Source | TimeOrdered | WithHistories, Source]:
    """The source in the order to write, and in the order of its files."""
    if not isinstance(source, TextSource) or source.time_column is None:
        return source, source
    unsorted = replace(source, time_column=None)
    if options.history is not None and source.histories is not None:
        if options.time_order is False:
            raise ConfigError(
                "histories are made in the order of time; leave out time_order=False (--file-order)"
            )
        chosen = HistoryOptions(options.history, options.history_of or "all")
        return WithHistories(
            TimeOrdered(source, scratch, keeps_time=True), source.histories, chosen
        ), unsorted
    if options.history_of is not None:
        raise ConfigError(
            "history_of says which events enter histories; give their length: history=50 (--history)"
        )
    return (unsorted if options.time_order is False else TimeOrdered(source, scratch)), unsorted


def _fingerprint(path: Path) -> dict[str, Any]:
    found = path.stat()
    return {"path": str(path), "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
