"""What is known of rows that come and go, in a checkpoint: by table name and key, for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, ShardWriter
from rowhaul.schedule.arrays import Arrays, Saved, text_array
from rowhaul.train.deferred import DeferredWriter

_GROUP = "lifetimes"
_NAMES = "names"  # of the tables, in the order in which rows number them
_FILTER = "admitted."  # arrays of a filter: good only where tables have the numbers that they had
_TABLES = {
    "tables": ("keys", "last", "count", "admitted"),
    "waiting.tables": ("waiting.keys", "waiting.counts"),
}


def write(
    writer: CheckpointWriter | ShardWriter | DeferredWriter, lifetimes: Arrays, tables: Sequence[str]
) -> None:
    """Keep what `Lifetimes.export` gave."""
    plain = {**lifetimes, _NAMES: text_array(json.dumps(list(tables)))}
    # PyTorch has few operations for unsigned words, and older files of it none.
    signed = {name: one.view(np.int64) if one.dtype == np.uint64 else one for name, one in plain.items()}
    writer.tensors(_GROUP, {name: torch.from_numpy(np.array(one)) for name, one in signed.items()})


def read(reader: CheckpointReader, tables: Sequence[str]) -> Arrays | None:
    """What `write` kept, for tables in this order; None where nothing was."""
    if _GROUP not in reader.groups:
        return None
    arrays: Arrays = {name: tensor.numpy() for name, tensor in reader.tensors(_GROUP).items()}
    before = json.loads(Saved(arrays).text(_NAMES))
    del arrays[_NAMES]
    for name in arrays:
        if name.startswith(_FILTER) and name != f"{_FILTER}room":
            arrays[name] = arrays[name].view(np.uint64)
    return arrays if before == list(tables) else _renumbered(arrays, before, tables)


def _renumbered(arrays: Arrays, before: Sequence[str], tables: Sequence[str]) -> Arrays:
    """The rows of tables that are still there, under the numbers that these have now."""
    number = np.array([tables.index(name) if name in tables else -1 for name in before], np.int32)
    kept = {name: array for name, array in arrays.items() if not name.startswith(_FILTER)}
    for column, others in _TABLES.items():
        if column in kept:
            now = number[kept[column]]
            kept |= {name: kept[name][now >= 0] for name in others}
            kept[column] = now[now >= 0]
    return kept
