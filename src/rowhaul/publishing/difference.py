"""What differs between the newest published version and the rows of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.publishing import compaction
from rowhaul.publishing.folder import PublishedFolder
from rowhaul.serve.deltas import Delta
from rowhaul.serve.files import file_entry
from rowhaul.serve.lookup_kernels import rows_of_keys
from rowhaul.serve.overlay import Overlay
from rowhaul.serve.overlay_kernels import DELETED, FREE, gather_records
from rowhaul.serve.row_file import RowFile
from rowhaul.store.served_rows import RecordBlock, ServedRows

Int64s = npt.NDArray[np.int64]


def newest_rows(folder: PublishedFolder) -> tuple[RowFile, Overlay]:
    """Open the base of the newest version, and what changed since.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    about, manifest = folder.published, folder.manifest
    assert about is not None
    assert manifest is not None
    base = RowFile(file_entry(manifest["rows"]).path(folder.path), manifest["rows"]["header"])
    overlay = Overlay(base)
    for one in about.deltas:
        overlay = overlay.with_changes(Delta.open(folder.path, one).rows)
    return base, overlay


def can_follow(folder: PublishedFolder, base: RowFile, tables: Mapping[str, ServedRows]) -> bool:
    """Whether rows can be published as a delta to a base: servers refuse other tables, records and graphs."""
    if not folder.keeps_graphs or base.tables.keys() != tables.keys():
        return False
    return all(
        (rows.dim, rows.value_type, rows.record_bytes)
        == (base.field(name, "dim"), base.value_type(name), base.field(name, "record_bytes"))
        for name, rows in tables.items()
    )


def difference(base: RowFile, overlay: Overlay, table: str, rows: ServedRows) -> ServedRows:
    """Return the rows of a table that are not the same in a published version, and those it has too many."""
    size, found = rows.record_bytes, []
    for block in rows.record_blocks():
        records = block.data.reshape(len(block.keys), size)
        places = _places(base, overlay, table, block.keys)
        there = np.flatnonzero(places)
        differs = places == 0
        published = np.empty((len(there), size), np.uint8)
        gather_records(places[there], size, published)
        differs[there] = (published != records[there]).any(axis=1)
        found.append((block.keys, differs, records[differs]))
    nothing = [np.empty(0, np.int64)]
    held = np.concatenate([*(keys for keys, _, _ in found), *nothing])
    changed = np.concatenate([*(keys[differs] for keys, differs, _ in found), *nothing])
    data = np.concatenate([*(one for _, _, one in found), np.empty((0, size), np.uint8)])
    before = np.concatenate([*compaction.folded_rows(base, overlay, table).key_blocks(), *nothing])
    deleted = np.setdiff1d(before, held)
    block = RecordBlock(changed, np.full(len(changed), size, np.int64), data.reshape(-1))
    keys, records_of = partial(_one, changed), partial(_one, block)
    return ServedRows(rows.dim, rows.value_type, len(changed), size, keys, records_of, deleted=deleted)


def _one(value: Any) -> Iterator[Any]:
    yield value


def _places(base: RowFile, overlay: Overlay, table: str, keys: Int64s) -> Int64s:
    """Return the addresses of records in the newest version; 0: there is none."""
    places = overlay.places(table, keys)
    unchanged = np.flatnonzero(places == FREE)
    found = np.empty(len(unchanged), np.int64)
    seed = np.uint64(base.field(table, "hash_seed") % (1 << 64))
    rows_of_keys(keys[unchanged], seed, base.bucket_starts(table), base.keys(table), found)
    first, size = base.address + base.field(table, "records_at"), base.field(table, "record_bytes")
    places[unchanged] = np.where(found < 0, 0, first + found * size)
    places[places == DELETED] = 0
    return places
