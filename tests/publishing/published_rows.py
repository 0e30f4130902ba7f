"""A small model to publish, and all rows of a served one by table and key: those of two files compare."""

import numpy as np
import torch

from rowhaul.export.serving.folder import export_served
from rowhaul.publishing.changed_rows import TableChange, served
from rowhaul.publishing.compaction import folded_rows
from rowhaul.publishing.folder import PublishedFolder, State
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve import Scorer
from rowhaul.serve.deltas import Moment
from rowhaul.store.row_format import format_of
from rowhaul.train import TrainConfig
from rowhaul.train.run_folder import open_saved
from rowhaul.train.trainer import Trainer

SMALL = {"embedding_dim": 4, "options": {"bottom": [8], "top": [16]}}
TABLES = ("user", "item", "tags")


def rows_of(scorer):
    """The bytes of every record, by table and key."""
    found, base = {}, scorer.folder.rows
    for table in base.tables:
        for block in folded_rows(base, scorer.rows.overlay, table).record_blocks():
            for place, (key, size) in enumerate(
                zip(block.keys.tolist(), block.lengths.tolist(), strict=True)
            ):
                found[table, key] = block.data[place * size : (place + 1) * size].tobytes()
    return found


def weights_of(path):
    """The weights of a graph, by name."""
    import onnx
    from onnx import numpy_helper

    weights = onnx.load(path).graph.initializer
    return {one.name: numpy_helper.to_array(one).tobytes() for one in weights}


def exported(run, out):
    """What `rowhaul export` makes of a run's newest checkpoint."""
    export_served(open_saved(str(run)), out)
    return Scorer(out)


class Writer:
    """Publishes what a test says changed; the weights are all the number of the version."""

    def __init__(self, path, schema, graph, run="a run", kind="onnx"):
        self._trainer = Trainer(TrainConfig.from_dict({"model": SMALL}), schema)
        self._format = format_of(self._trainer.collection.row_settings)
        self._weights = dict(self._trainer.model.named_parameters())
        self._tables = dict.fromkeys(TABLES, (4, "float32"))
        self.folder = PublishedFolder(path, run, self._trainer, GraphWriter({kind: graph}, self._weights))
        if self.folder.published is None:
            self.write_base({}, 0)

    def write_base(self, rows, step):
        """Publish a whole model."""
        self.folder.write_base(self._served(rows, {}), self._state(step), _Uncounted())

    def write_delta(self, rows, deleted, step, ends=True, edit=lambda folder: None):
        """Publish changed rows, {(table, key): values}, and deleted keys; or die before the end.

        ``edit`` is called with the folder of the delta before ``served.json`` names it.
        """
        name, folder = self.folder.begin_delta()
        part = self.folder.write_part(folder, "r0000", self._served(rows, deleted), step)
        edit(folder)
        return self.folder.end_delta(name, [part], self._state(step)) if ends else None

    def _served(self, rows, deleted):
        changes = {}
        for table in TABLES:
            mine = {key: values for (name, key), values in rows.items() if name == table}
            gone = [key for name, key in deleted if name == table]
            values = np.array(list(mine.values()), np.float32).reshape(-1, 4)
            changes[table] = TableChange(np.array(list(mine), np.int64), values, np.array(gone, np.int64))
        return served(self._format, changes, self._tables, lambda: None)

    def _state(self, step):
        weights = {name: torch.full_like(one, step / 100) for name, one in self._weights.items()}
        return State(Moment(step, 10 * step, 1e9 + step, None), weights, {})


class _Uncounted:
    def add(self, count):
        """Count nothing."""
