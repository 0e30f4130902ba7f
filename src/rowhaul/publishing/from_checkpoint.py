"""Publishes a checkpoint: the base, or as a delta what differs from the newest version.

This is how a cluster publishes. Its checkpoints are settled already, every row written by the rank that has
its latest record, so nothing more moves between ranks. What changed is found by comparing, not by tracking:
all rows are read, those that differ are written. It runs in a process of its own, beside training.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._id_kinds import kinds_in
from rowhaul.checkpoint import CheckpointReader, Place, as_place
from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.publishing import compaction
from rowhaul.publishing.changed_rows import check_format
from rowhaul.publishing.folder import PublishedFolder, State
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve.deltas import Delta, Moment, Published
from rowhaul.serve.files import file_entry
from rowhaul.serve.lookup_kernels import rows_of_keys
from rowhaul.serve.overlay import Overlay
from rowhaul.serve.overlay_kernels import DELETED, FREE, gather_records
from rowhaul.serve.row_file import RowFile
from rowhaul.store.row_format import format_of
from rowhaul.store.served_rows import RecordBlock, ServedRows
from rowhaul.train.loading import load_trained

Int64s = npt.NDArray[np.int64]
_NICE = 10
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def publish_checkpoint(path: str | Place, to: Path, run: str) -> None:
    """Publish a checkpoint of a run to a folder; nothing is done where its step is the newest version's.

    Raises:
        ConfigError: rows that cannot be published, or a folder that is not this run's.
        CheckpointError: a file is damaged.
    """
    reader, trainer = CheckpointReader(path), load_trained(path)
    settings = trainer.config.publish
    check_format(format_of(trainer.collection.row_settings))
    folder = PublishedFolder(to, run, trainer, GraphWriter.exported(trainer.model, settings.kinds))
    moment = Moment(trainer.step, trainer.samples, time.time())
    state = State(moment, reader.tensors("model"), kinds_in(reader.facts))
    tables = {
        one.name: reader.format(one.name).served_rows(reader, one.name)
        for one in trainer.collection.embedding_bag_configs()
    }
    about = folder.published
    if about is None:
        folder.write_base(tables, state, Counter(1, lambda done, total: None))
        return
    if about.newest_step == trainer.step:
        return
    base, overlay = _newest(folder, about)
    name, place = folder.begin_delta()
    rows = {table: difference(base, overlay, table, rows) for table, rows in tables.items()}
    folder.end_delta(name, [folder.write_part(place, "r0000", rows, trainer.step)], state)
    if compaction.is_due(folder, settings.compact_after):
        compaction.compact(folder, lambda: None)


def _newest(folder: PublishedFolder, about: Published) -> tuple[RowFile, Overlay]:
    manifest = folder.manifest
    assert manifest is not None
    base = RowFile(file_entry(manifest["rows"]).path(folder.path), manifest["rows"]["header"])
    overlay = Overlay(base)
    for one in about.deltas:
        overlay = overlay.with_changes(Delta.open(folder.path, one).rows)
    return base, overlay


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


def publish_in_a_process(path: Place, to: Path, run: str) -> None:
    """Publish a checkpoint in another process, and wait for it.

    Raises:
        CheckpointError: with what the process said.
    """
    program = "import sys; from rowhaul.publishing.from_checkpoint import main; main(*sys.argv[1:])"
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(to), run],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise CheckpointError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")


def main(path: str, to: str, run: str) -> None:
    """Publish a checkpoint, and give way to whatever else runs."""
    os.nice(_NICE)
    publish_checkpoint(as_place(path), Path(to), run)
