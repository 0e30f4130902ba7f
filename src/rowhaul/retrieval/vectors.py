"""Vectors of the items and users of a trained two-tower model, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from rowhaul.data.files import expand_files
from rowhaul.data.parquet import naming
from rowhaul.data.samples import Samples
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch
from rowhaul.nn.models import TwoTower
from rowhaul.store.row_format import format_of
from rowhaul.train.absent_columns import FilledStream
from rowhaul.train.trainer import Trainer

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_BLOCK = 8192  # items at a time


def item_vectors(trainer: Trainer, items: Any = None) -> tuple[Int64s, Floats]:
    """Keys of items and their vectors, items x size.

    Args:
        trainer: of a two-tower model, as `rowhaul.train.load_trained` returns it.
        items: Parquet files with the item's columns, a line an item; the first line of an item counts. By
            default all rows of the item's table, for an item that has one feature.
    """
    model = two_tower(trainer)
    batches = _trained_items(trainer, model) if items is None else _listed_items(trainer, model, items)
    found = [(keys, _run(model.item_vectors, model, samples)) for keys, samples in batches]
    if not sum(len(keys) for keys, _ in found):
        raise ConfigError("no item has a row yet; train first, or list items")
    keys, vectors = (np.concatenate(part) for part in zip(*found, strict=True))
    _, first = np.unique(keys, return_index=True)  # in the order of keys
    return keys[first], vectors[first]


def user_vectors(trainer: Trainer, data: Any, batch_size: int = _BLOCK) -> Iterator[tuple[Samples, Floats]]:
    """Yield samples of Parquet files and their users' vectors; columns of item and label may be absent."""
    model = two_tower(trainer)
    for samples in open_users(trainer, data, batch_size):
        yield samples, _run(model.user_vectors, model, samples)


def open_users(trainer: Trainer, data: Any, batch_size: int = _BLOCK) -> SampleStream:
    """Open the samples of `user_vectors`: all that the files' footers show to be wrong is an error here."""
    schema = trainer.schema
    labels = set(schema.column_names(with_label=True)) - set(schema.column_names(with_label=False))
    has_labels = True
    for path in expand_files(data):
        with naming(path):
            has_labels &= labels <= set(pq.read_schema(path).names)
    stream = FilledStream(data, schema, batch_size, require_label=has_labels)
    trainer.check_keys(stream)
    return stream


def item_keys(samples: Samples, name: str) -> Int64s:
    """The item of each sample, which must be one id."""
    at = samples.features.index(name)
    lengths = samples.lengths[at]
    if (lengths != 1).any():
        wrong = int(np.argmax(lengths != 1))
        raise ConfigError(
            f"sample {samples.index[wrong]:,} has {lengths[wrong]} ids in {name!r}; an item needs exactly one"
        )
    keys: Int64s = samples.ids_of_features()[at]
    return keys


def two_tower(trainer: Trainer) -> TwoTower:
    """The model of a trainer, refused unless it has a tower for items."""
    if not isinstance(trainer.model, TwoTower):
        raise ConfigError(
            f"the model is {trainer.model_name}, which has no item vectors of its own; train two_tower for "
            "retrieval"
        )
    return trainer.model


def _trained_items(trainer: Trainer, model: TwoTower) -> Iterator[tuple[Int64s, Samples]]:
    if len(model.item) > 1:
        raise ConfigError(
            f"items have several features, {', '.join(model.item)}: list them with all (--items FILES)"
        )
    if not format_of(trainer.collection.row_settings).keyed_by_id:
        raise ConfigError(
            "rows within a memory budget do not say which items they are of: list the items (--items FILES)"
        )
    name = model.item[0]
    table = next(one.name for one in trainer.collection.table_configs() if name in one.feature_names)
    features = trainer.schema.features
    for keys, _ in trainer.collection.rows(table):
        for first in range(0, len(keys), _BLOCK):
            some = np.ascontiguousarray(keys[first : first + _BLOCK])
            lengths = np.zeros((len(features), len(some)), np.int32)
            lengths[features.index(name)] = 1
            dense = np.zeros((len(some), len(trainer.schema.dense)), np.float32)
            yield some, Samples(features, some, lengths, dense, None, np.arange(len(some)))


def _listed_items(trainer: Trainer, model: TwoTower, items: Any) -> Iterator[tuple[Int64s, Samples]]:
    stream = FilledStream(items, trainer.schema, _BLOCK)
    absent = [name for name in model.item if name in stream.absent]
    if absent:
        raise ConfigError(f"the items lack {', '.join(absent)}, which the item tower reads")
    trainer.check_keys(stream)
    for samples in stream:
        yield item_keys(samples, model.item[0]), samples


def _run(towers: Any, model: TwoTower, samples: Samples) -> Floats:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            vectors: Floats = towers(Batch.from_samples(samples)).to("cpu", torch.float32).numpy()
    finally:
        model.train(was_training)
    return vectors
