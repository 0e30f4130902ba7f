"""Publishes a checkpoint: as a delta what differs from the newest version, or as a base.

This is how a cluster that resumes goes on. What changed is found by comparing, not by tracking: all rows are
read, those that differ are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from rowhaul._id_kinds import kinds_in
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.publishing.difference import can_follow, difference, newest_rows
from rowhaul.publishing.folder import PublishedFolder, State
from rowhaul.serve.deltas import Moment


def publish_checkpoint(reader: CheckpointReader, tables: Iterable[str], folder: PublishedFolder) -> None:
    """Publish a checkpoint of a run; nothing is done where the newest version is the same.

    Where a published file is missing or damaged, or was of rows or graphs of another kind, a new base takes
    the place of all.
    """
    moment = Moment(int(reader.facts["step"]), int(reader.facts["samples"]), time.time())
    state = State(moment, reader.tensors("model"), kinds_in(reader.facts))
    saved = {table: reader.format(table).served_rows(reader, table) for table in tables}
    about = folder.published
    try:
        newest = None if about is None else newest_rows(folder)
    except CheckpointError:
        newest = None
    if about is None or newest is None or not can_follow(folder, newest[0], saved):
        folder.write_base(saved, state, Counter(1, lambda done, total: None))
        return
    rows = {table: difference(*newest, table, one) for table, one in saved.items()}
    if about.newest_step == moment.step and not any(one.num_rows or one.num_deleted for one in rows.values()):
        return
    name, place = folder.begin_delta()
    folder.end_delta(name, [folder.write_part(place, "r0000", rows, moment.step)], state)
