"""A trained model to evaluate or to serve: from a run, from one of its checkpoints, or from an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from rowhaul._id_kinds import kinds_in
from rowhaul.checkpoint import Place, as_place
from rowhaul.checkpoint.location import local_path
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import CheckpointError
from rowhaul.export.manifest import MANIFEST_FILE
from rowhaul.export.reader import ExportReader
from rowhaul.store.row_format import RowFormat, format_of
from rowhaul.train import snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.run_folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    checkpoints_of,
    has_checkpoint,
    open_saved,
    saved_settings,
)
from rowhaul.train.trainer import Trainer

_SERVED_FILE = "served.json"  # of `export --dense`


def load_trained(run: str | Place, on_unknown: str | None = None) -> Trainer:
    """Return the trainer of a run, of one of its checkpoints or of an export, as it was saved.

    Checkpoints may be at URLs. Pruned rows are loaded without what only training needs; exports do not have
    it. A damaged checkpoint is refused; no older one is taken in its place.
    """
    folder = local_path(as_place(run))
    if folder is not None and (folder / MANIFEST_FILE).is_file():
        return _load_export(ExportReader(folder), on_unknown)
    if folder is not None and (folder / _SERVED_FILE).is_file():
        raise CheckpointError(
            f"{run} is a folder to serve from (export --dense); name the run, or an export without --dense"
        )
    if folder is not None and (folder / CONFIG_FILE).is_file() and not has_checkpoint(folder):
        raise CheckpointError(_without_checkpoint(folder))
    try:
        reader = open_saved(run)
    except CheckpointError as error:
        if type(error) is not CheckpointError:  # it is one, but cannot be read
            raise
        raise CheckpointError(f"{run} is no training run: {error}, or an export") from None
    settings = saved_settings(reader)
    if settings is None:
        raise CheckpointError(
            f"{run} says nothing of its model: it was saved outside of a run, or by an older version and "
            f"then moved; give the --out of a `train`, with its {CONFIG_FILE}, or an export of it"
        )
    trainer = _serving(*settings, on_unknown)
    snapshot.restore(trainer, reader.path)
    return trainer


def _without_checkpoint(run: Path) -> str:
    """Say that a run has no checkpoint where it keeps them."""
    wait = "let the training finish or resume it"
    place = checkpoints_of(TrainConfig.read(run / CONFIG_FILE), run)
    if place == run / CHECKPOINTS:
        return f"{run} has no complete checkpoint yet; {wait}"
    return (
        f"{run} keeps its checkpoints in {place}, and no complete one is there; {wait}, or name their folder "
        "if they were moved"
    )


def _serving(config: TrainConfig, schema: Schema, on_unknown: str | None) -> Trainer:
    """Make a trainer without rows, on the CPU: a card that a run had may not be here."""
    config = replace(config, device="cpu", device_memory="")
    if on_unknown is not None:
        config = replace(config, on_unknown=on_unknown)
    trainer = Trainer(config, schema)
    _format(trainer).serve(trainer.collection)
    return trainer


def _load_export(reader: ExportReader, on_unknown: str | None) -> Trainer:
    if not {CONFIG_FILE, SCHEMA_FILE} <= set(reader.facts["settings"]):
        raise CheckpointError(
            f"{reader.path} says nothing of the model that its tables are of: it was exported from a "
            "checkpoint outside of a run. Export the run, or one of its checkpoints where it is"
        )
    config = TrainConfig.read(reader.path / CONFIG_FILE)
    trainer = _serving(config, Schema.read(reader.path / SCHEMA_FILE), on_unknown)
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
    for config in trainer.collection.table_configs():
        table = reader.tables.get(config.name)
        if table is None:
            raise CheckpointError(
                f"{reader.path} lacks table {config.name!r}, which its model reads; export without --table"
            )
        found = (table.dim, table.dtype, table.format)
        needed = (config.embedding_dim, trainer.config.precision, _format(trainer).exported_as)
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
