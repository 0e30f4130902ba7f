"""A trained model to evaluate or to serve: from a run, from one of its checkpoints, or from an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rowhaul._id_kinds import kinds_in
from rowhaul.checkpoint import latest_checkpoint
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError
from rowhaul.export.manifest import MANIFEST_FILE
from rowhaul.export.reader import ExportReader
from rowhaul.store.row_format import RowFormat, format_of
from rowhaul.train import snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.run_folder import CHECKPOINTS, CONFIG_FILE
from rowhaul.train.trainer import Trainer


def load_trained(run: str | Path, on_unknown: str | None = None) -> Trainer:
    """Return the trainer of a run, of one of its checkpoints or of an export, as it was saved.

    Pruned rows are loaded without what only training needs; exports do not have it.
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
    """Make a trainer without rows, as a folder's configuration describes it."""
    config = TrainConfig.read(folder / CONFIG_FILE)
    if on_unknown is not None:
        config = replace(config, on_unknown=on_unknown)
    trainer = Trainer(config, Schema.read(folder / SCHEMA_FILE))
    _format(trainer).serve(trainer.collection)
    return trainer


def _load_export(reader: ExportReader, on_unknown: str | None) -> Trainer:
    if not {CONFIG_FILE, SCHEMA_FILE} <= set(reader.facts["settings"]):
        raise CheckpointError(
            f"{reader.path} says nothing of the model that its tables are of: it was exported from a "
            "checkpoint outside of a run. Export the run, or one of its checkpoints where it is"
        )
    trainer = _serving(reader.path, on_unknown)
    _load_dense(trainer, reader)
    _check_tables(trainer, reader)
    _format(trainer).load_export(reader, trainer.collection)
    trainer.step, trainer.samples = reader.facts["step"] or 0, reader.facts["samples"] or 0
    trainer.key_kinds = kinds_in(reader.facts)
    return trainer


def _format(trainer: Trainer) -> RowFormat:
    return format_of(trainer.collection.row_settings)


def _check_tables(trainer: Trainer, reader: ExportReader) -> None:
    """Refuse an export that lacks tables of its model, or has others."""
    for config in trainer.collection.embedding_bag_configs():
        table = reader.tables.get(config.name)
        if table is None:
            raise CheckpointError(
                f"{reader.path} lacks table {config.name!r}, which its model reads; export without --table"
            )
        found = (table.dim, table.dtype, table.format)
        needed = (config.embedding_dim, trainer.config.precision, _format(trainer).name)
        if found != needed:
            raise CheckpointError(
                "{}: table {!r} has rows of {} values in {}, {}; its model needs {} in {}, {}: export again, "
                "without --whole".format(reader.path, config.name, *found, *needed)
            )


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
