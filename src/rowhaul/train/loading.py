"""A trained model to evaluate or to serve: from a run, from one of its checkpoints, or from an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rowhaul.checkpoint import latest_checkpoint
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError
from rowhaul.export.manifest import MANIFEST_FILE
from rowhaul.export.reader import ExportReader
from rowhaul.pruning.plain_files import PrunedLayout
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.pruning.pool.state import PRUNER_PARTS, Arrays, load_pruners, load_rows
from rowhaul.train import snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.run_folder import CHECKPOINTS, CONFIG_FILE
from rowhaul.train.trainer import Trainer


def load_trained(run: str | Path, on_unknown: str | None = None) -> Trainer:
    """The trainer of a run, of one of its checkpoints or of an export, as it was saved.

    Of pruned rows only what serving needs is loaded, and exports have no more than that.
    """
    path = Path(run)
    if (path / MANIFEST_FILE).is_file():
        return _load_export(ExportReader(path), on_unknown)
    folder = path.parent.parent if path.parent.name == CHECKPOINTS else path
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{run} is no training run: it has no {CONFIG_FILE}; give the --out of a `train`, or an export "
            "of it"
        )
    checkpoint = path if path != folder else latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no complete checkpoint yet; let the training finish or resume it")
    trainer = _serving(folder, on_unknown)
    snapshot.restore(trainer, checkpoint)
    return trainer


def _serving(folder: Path, on_unknown: str | None) -> Trainer:
    """A trainer without rows, as a folder's configuration describes it."""
    config = TrainConfig.read(folder / CONFIG_FILE)
    if on_unknown is not None:
        config = replace(config, on_unknown=on_unknown)
    trainer = Trainer(config, Schema.read(folder / SCHEMA_FILE))
    if trainer.collection.pruning is not None:
        trainer.collection.pruning.serve()  # before rows come: utilities and state are not even loaded
    return trainer


def _load_export(reader: ExportReader, on_unknown: str | None) -> Trainer:
    if not {CONFIG_FILE, SCHEMA_FILE} <= set(reader.facts["settings"]):
        raise CheckpointError(
            f"{reader.path} says nothing of the model that its tables are of: it was exported from a "
            "checkpoint outside of a run. Export the run, or one of its checkpoints where it is"
        )
    trainer = _serving(reader.path, on_unknown)
    _load_dense(trainer, reader)
    pruning = trainer.collection.pruning
    _check_tables(trainer, reader)
    if pruning is not None:
        load_pruners(pruning, _pruner_arrays(pruning, reader))
    for table in reader.tables:
        if pruning is None:
            _load_whole(trainer, reader, table)
        else:
            _load_chunks(pruning, reader, table)
    trainer.step, trainer.samples = reader.facts["step"] or 0, reader.facts["samples"] or 0
    trainer.key_kinds = dict(reader.facts["key_kinds"] or {})
    return trainer


def _check_tables(trainer: Trainer, reader: ExportReader) -> None:
    """Refuse an export that lacks tables of its model, or has others."""
    pruning = trainer.collection.pruning
    dtype = trainer.config.precision
    for config in trainer.collection.embedding_bag_configs():
        table = reader.tables.get(config.name)
        if table is None:
            raise CheckpointError(
                f"{reader.path} lacks table {config.name!r}, which its model reads; export without --table"
            )
        found, needed = (table.dim, table.dtype), (config.embedding_dim, dtype)
        if found != needed:
            raise CheckpointError(
                f"{reader.path}: table {config.name!r} has rows of {found[0]} values in {found[1]}, its "
                f"model needs {needed[0]} in {needed[1]}; export again"
            )
        cut = None if table.pruned is None else table.pruned.num_chunks
        expected = None if pruning is None else pruning.settings.chunks
        if cut != expected:
            raise CheckpointError(
                f"{reader.path}: the rows of table {config.name!r} are {_form(cut)}, those of its model "
                f"{_form(expected)}; export again, without --whole"
            )


def _form(chunks: int | None) -> str:
    return "whole" if chunks is None else f"in {chunks} chunks"


@torch.no_grad()
def _load_dense(trainer: Trainer, reader: ExportReader) -> None:
    tensors = reader.dense()
    for name, tensor in (*trainer.model.named_parameters(), *trainer.model.named_buffers()):
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = tuple(tensors[name].shape) if name in tensors else "absent"
            raise CheckpointError(
                f"{reader.path} is of another model: weight {name!r} is {found} there and "
                f"{tuple(tensor.shape)} in the model of its {CONFIG_FILE}; export again"
            )
        tensor.copy_(tensors[name])


def _load_whole(trainer: Trainer, reader: ExportReader, table: str) -> None:
    """Rows as they are; optimizer state, which serving does not read, as it begins."""
    rule, dim = trainer.collection.optimizer, reader.tables[table].dim
    width = rule.state_width(dim)
    for keys, values in reader.rows(table):
        state = np.full((len(keys), width), rule.initial_state, values.dtype)
        trainer.collection.load_rows(table, keys, np.concatenate([values, state], axis=1))


def _load_chunks(pruning: PrunedRows, reader: ExportReader, table: str) -> None:
    layout = reader.tables[table].layout()
    assert isinstance(layout, PrunedLayout)
    for block in reader.chunks(table):
        load_rows(
            pruning,
            table,
            {
                "keys": block.keys,
                "present": block.present,
                "chunks": layout.chunks(block),
                "utilities": np.zeros(block.present.shape, np.float32),
                "touched": np.zeros(len(block.keys), np.int32),
            },
        )


def _pruner_arrays(pruning: PrunedRows, reader: ExportReader) -> Arrays:
    """What pruners are to know: which columns there are; the rest is for training."""
    arrays: Arrays = {}
    for number, tables in enumerate(pruning.tables):
        parts = [reader.tables[spec.name].pruned for spec in tables.tables]
        columns = np.array([part.columns for part in parts if part is not None], np.int64)
        registers, numbers, _, sums = tables.state()
        numbers[5] = columns.shape[1] == tables.dim  # whether columns are still to be chosen
        known = (registers, numbers, columns, sums)
        arrays |= {f"{number}.{name}": one for name, one in zip(PRUNER_PARTS, known, strict=True)}
    return arrays
