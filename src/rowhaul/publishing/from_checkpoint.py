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
from dataclasses import replace
from pathlib import Path

from rowhaul._id_kinds import kinds_in
from rowhaul.checkpoint import CheckpointReader, Place, as_place
from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.publishing import compaction
from rowhaul.publishing.difference import difference, newest_rows
from rowhaul.publishing.folder import PublishedFolder, State
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve.deltas import Moment
from rowhaul.train.run_folder import saved_settings
from rowhaul.train.trainer import Trainer

_NICE = 10
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def publish_checkpoint(path: str | Place, to: Path, run: str) -> None:
    """Publish a checkpoint of a run to a folder; nothing is done where the newest version is the same.

    Raises:
        ConfigError: the folder is not this run's.
        CheckpointError: a file is damaged.
    """
    reader = CheckpointReader(path)
    if (saved := saved_settings(reader)) is None:
        raise CheckpointError(f"{path} says nothing of its model: it was saved outside of a run")
    config, schema = replace(saved[0], device="cpu", device_memory=""), saved[1]
    settings, trainer = config.publish, Trainer(config, schema)  # without rows, which may not fit here
    folder = PublishedFolder(to, run, trainer, GraphWriter.exported(trainer.model, settings.kinds))
    moment = Moment(int(reader.facts["step"]), int(reader.facts["samples"]), time.time())
    state = State(moment, reader.tensors("model"), kinds_in(reader.facts))
    tables = {
        one.name: reader.format(one.name).served_rows(reader, one.name)
        for one in trainer.collection.table_configs()
    }
    about = folder.published
    if about is None:
        folder.write_base(tables, state, Counter(1, lambda done, total: None))
        return
    base, overlay = newest_rows(folder)
    rows = {table: difference(base, overlay, table, rows) for table, rows in tables.items()}
    has_changes = any(one.num_rows or one.num_deleted for one in rows.values())
    if about.newest_step == moment.step and not has_changes:
        return
    name, place = folder.begin_delta()
    folder.end_delta(name, [folder.write_part(place, "r0000", rows, moment.step)], state)
    if compaction.is_due(folder, settings.compact_after):
        compaction.compact(folder, lambda: None)


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
