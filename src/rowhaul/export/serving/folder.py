"""Writing a folder that a model is served from; what is in it: `rowhaul.serve.folder`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rowhaul._files import check_new_folder, temporary_beside, whole
from rowhaul._id_kinds import kinds_in
from rowhaul._manifest import write_manifest
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter, Progress
from rowhaul.data.schema import SCHEMA_FILE
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.manifest import README_FILE
from rowhaul.export.serving.comparison import Comparison, compare
from rowhaul.export.serving.dense import check_exporters, export_dense, graph_kinds
from rowhaul.export.serving.readme import readme
from rowhaul.export.serving.row_file import UnknownIds, write_rows
from rowhaul.serve.files import ServedFile
from rowhaul.serve.folder import DENSE_FILES, FORMAT, MANIFEST_FILE, ROWS_FILE, VERSION
from rowhaul.serve.scorer import Scorer
from rowhaul.store import TableSpec
from rowhaul.train.loading import load_trained
from rowhaul.train.trainer import Trainer

_BASE = "base-{:09d}"


@dataclass(frozen=True)
class ServedExport:
    """What an export made."""

    path: Path
    num_rows: dict[str, int]  # by table
    sizes: dict[str, int]  # bytes of its files
    comparison: Comparison


def export_served(
    reader: CheckpointReader,
    to: str | Path,
    *,
    dense: Sequence[str] = ("onnx",),
    progress: Progress = lambda done, total: None,
) -> ServedExport:
    """Write a checkpoint as a new folder to serve from, and compare its logits with the model's own.

    Args:
        reader: of the checkpoint, which must know its run's configuration.
        to: the folder.
        dense: kinds of graphs of the dense part: ``onnx``, ``pt2`` (`torch.export`) or both.
        progress: called with the rows written, and all.

    Raises:
        ConfigError: an unknown kind of graph, a missing package, or a folder that exists.
        CheckpointError: a damaged checkpoint, or one whose export gives other logits; nothing is kept.
    """
    path, kinds = Path(to), list(dict.fromkeys(dense))
    check_exporters(kinds)
    check_new_folder(path, "the export")
    trainer = load_trained(reader.path)
    check_servable(trainer)
    kinds = graph_kinds(trainer.model, kinds)
    tables = [config.name for config in trainer.collection.table_configs()]
    count = Counter(sum(reader.tables[name].num_rows for name in tables), progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary_beside(path), ignore_errors=True)  # what a killed export left
    with whole(path) as folder:
        base = _BASE.format(trainer.step)
        (folder / base).mkdir(parents=True)
        header = write_rows(
            reader, tables, unknown_ids(trainer), folder / base / ROWS_FILE, trainer.step, count
        )
        for kind in kinds:
            export_dense(trainer.model, kind, folder / base / DENSE_FILES[kind])
        trainer.schema.write(folder / SCHEMA_FILE)
        manifest = _manifest(reader, trainer, folder, base, kinds, header)
        _write(folder, manifest)
        comparison = compare({kind: Scorer(folder, backend=kind) for kind in kinds}, trainer, reader)
        manifest["compared"] = {
            "samples": comparison.num_samples,
            "unseen_ids": comparison.num_unseen,
            "largest_differences": comparison.differences,
        }
        _write(folder, manifest)
        (folder / README_FILE).write_text(readme(manifest, trainer.schema), encoding="utf-8")
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        sizes = {str(one.relative_to(folder)): one.stat().st_size for one in files}
    rows = {name: reader.tables[name].num_rows for name in tables}
    return ServedExport(path, rows, sizes, comparison)


def check_servable(trainer: Trainer) -> None:
    """Refuse a model that reads rows one by one.

    Raises:
        ConfigError: it says what to do instead.
    """
    if not trainer.model.is_pooled:
        raise ConfigError(
            f"--dense writes what follows pooled vectors, and {trainer.model_name} reads rows one by one, "
            "as those of a history or of negatives, so there is nothing a server could pool; score with "
            "`rowhaul predict`, or leave out --dense (or --publish) and export tables and dense weights"
        )


def unknown_ids(trainer: Trainer) -> UnknownIds:
    """Return what ids without a row of a model read."""
    configs = trainer.collection.table_configs()
    specs = {one.name: TableSpec(one.name, one.embedding_dim, *one.initial_range) for one in configs}
    return UnknownIds(trainer.config.on_unknown, trainer.config.seed, specs)


def model_facts(trainer: Trainer) -> dict[str, Any]:
    """Return what a served folder's manifest says of a model, whatever its rows and weights are."""
    model, schema = trainer.model, trainer.schema
    begins = dict(zip(model.features, accumulate(model.widths, initial=0), strict=False))
    table_of = {column.name: column.table for column in schema.ids}
    if set(begins) != set(schema.features):
        raise CheckpointError("the model's features are not the schema's; train again")
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": trainer.model_name,
        "precision": trainer.config.precision,
        "features": [
            {"name": name, "table": table_of[name], "column": begins[name]} for name in schema.features
        ],
        "width": sum(model.widths),
        "numbers": [column.name for column in schema.dense],
    }


def _manifest(
    reader: CheckpointReader, trainer: Trainer, folder: Path, base: str, kinds: Sequence[str], header: str
) -> dict[str, Any]:
    rows = ServedFile.of(folder, f"{base}/{ROWS_FILE}")
    dense = {kind: ServedFile.of(folder, f"{base}/{DENSE_FILES[kind]}")._asdict() for kind in kinds}
    return {
        **model_facts(trainer),
        "step": trainer.step,
        "samples": trainer.samples,
        "key_kinds": kinds_in(reader.facts),
        "schema": ServedFile.of(folder, SCHEMA_FILE)._asdict(),
        "rows": {**rows._asdict(), "header": header},
        "dense": dense,
    }


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST_FILE).write_bytes(write_manifest(manifest))
