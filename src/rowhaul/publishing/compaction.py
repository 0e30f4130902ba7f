"""Compaction: a base and the deltas after it become a new base, from their files alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._files import sync
from rowhaul.checkpoint.progress import Counter
from rowhaul.export.serving.row_file import write_row_file
from rowhaul.publishing.folder import PublishedFolder
from rowhaul.serve.deltas import Delta
from rowhaul.serve.files import ServedFile, file_entry
from rowhaul.serve.folder import ROWS_FILE
from rowhaul.serve.overlay import Overlay
from rowhaul.serve.overlay_kernels import FREE, gather_records
from rowhaul.serve.row_file import FIELD, VALUE_TYPES, RowFile
from rowhaul.store.served_rows import RecordBlock, ServedRows

Int64s = npt.NDArray[np.int64]
Pace = Callable[[], None]
_SLICE_ROWS = 1 << 14
_UNKNOWN = ("unknown", "initial_seed", "initial_low", "initial_step")
_FEW = 10  # deltas: fewer are not worth a new base


def is_due(folder: PublishedFolder, most: int) -> bool:
    """Whether there are so many deltas, or they are larger than the base."""
    about = folder.published
    if about is None or folder.manifest is None or len(about.deltas) < min(_FEW, most):
        return False
    size = sum(one.bytes for one in about.deltas)
    return len(about.deltas) >= most or size > int(folder.manifest["rows"]["bytes"])


def compact(folder: PublishedFolder, pace: Pace) -> None:
    """Fold all deltas that are published by now into a new base; those that follow meanwhile stay.

    Raises:
        CheckpointError: a file is missing or damaged; everything stays as it is.
    """
    about, manifest = folder.published, folder.manifest
    if about is None or manifest is None or not about.deltas:
        return
    base = RowFile(file_entry(manifest["rows"]).path(folder.path), manifest["rows"]["header"])
    deltas = [Delta.open(folder.path, one) for one in about.deltas]
    overlay = Overlay(base)
    for one in deltas:
        pace()
        overlay = overlay.with_changes(one.rows)
    last = deltas[-1]

    def write(to: Path) -> dict[str, Any]:
        rows = {table: folded_rows(base, overlay, table, pace) for table in base.tables}
        unknown = {table: _unknown(base, table) for table in base.tables}
        header = write_row_file(
            rows, unknown, to / ROWS_FILE, last.moment.step, Counter(1, lambda done, total: None)
        )
        for graph in last.dense.values():
            shutil.copyfile(graph, to / graph.name)
            sync(to / graph.name)
        dense = {kind: ServedFile.of(to, graph.name)._asdict() for kind, graph in last.dense.items()}
        file = {**ServedFile.of(to, ROWS_FILE)._asdict(), "header": header}
        return {"rows": file, "dense": dense, "moment": last.moment}

    folder.fold(about, write, last.key_kinds)


def folded_rows(base: RowFile, overlay: Overlay, table: str, pace: Pace = lambda: None) -> ServedRows:
    """Return the rows of a table after all changes."""
    size, keys = base.field(table, "record_bytes"), base.keys(table)
    first = base.address + base.field(table, "records_at")

    def places() -> Iterator[tuple[Int64s, Int64s]]:
        for begin in range(0, len(keys), _SLICE_ROWS):
            pace()
            some = keys[begin : begin + _SLICE_ROWS]
            kept = np.flatnonzero(overlay.places(table, some) == FREE)
            yield some[kept], first + (begin + kept) * size
        changed, where = overlay.rows(table)
        for begin in range(0, len(changed), _SLICE_ROWS):
            pace()
            yield changed[begin : begin + _SLICE_ROWS], where[begin : begin + _SLICE_ROWS]

    def key_blocks() -> Iterator[Int64s]:
        return (some for some, _ in places())

    def record_blocks() -> Iterator[RecordBlock]:
        for some, where in places():
            data = np.empty(len(some) * size, np.uint8)
            gather_records(where, size, data)
            yield RecordBlock(some, np.full(len(some), size, np.int64), data)

    num_rows = sum(len(some) for some in key_blocks())
    value_type = VALUE_TYPES[base.field(table, "value_type")]
    return ServedRows(base.field(table, "dim"), value_type, num_rows, size, key_blocks, record_blocks)


def _unknown(base: RowFile, table: str) -> dict[str, int | float]:
    """Return what a base says of ids without a row."""
    found: dict[str, int | float] = {}
    for name in _UNKNOWN:
        word = base.entries[base.tables[table], FIELD[name]]
        is_float = name in ("initial_low", "initial_step")
        found[name] = float(word.view(np.float64)) if is_float else int(word.view(np.uint64))
    return found
