"""A trainer's whole state to and from a checkpoint, to continue with the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul._id_kinds import kind_facts, kinds_in
from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, Place, ShardWriter
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.nn import TableCollection
from rowhaul.nn.local_rows import LocalRows
from rowhaul.nn.row_source import CachedOverHost
from rowhaul.schedule.arrays import Saved
from rowhaul.store import TableGroup
from rowhaul.store.changes import Changes
from rowhaul.store.row_format import convert_hint, format_of
from rowhaul.store.snapshot import GroupSnapshot
from rowhaul.train import saved_lifetimes
from rowhaul.train.deferred import DeferredWriter, Pace
from rowhaul.train.dense_state import load_portable, portable_state
from rowhaul.train.trainer import Trainer


class Trained(Protocol):
    """A model in training, as a checkpoint sees it: a `Trainer`, or the state of your own loop."""

    dense: torch.optim.Optimizer
    step: int
    samples: int
    key_kinds: dict[str, str]

    @property
    def model(self) -> torch.nn.Module:
        """The model."""

    @property
    def model_name(self) -> str:
        """What the model is called in messages."""

    @property
    def collection(self) -> TableCollection:
        """The embedding tables."""

    def count_row_steps(self, steps: int) -> None:
        """Continue after ``steps`` steps of the rows."""


def save(trainer: Trainer, path: str | Place, facts: dict[str, Any] | None = None) -> None:
    """Write a checkpoint; ``facts`` are plain values to keep with it."""
    with CheckpointWriter(path) as writer:
        _save(trainer, writer, facts, trainer.collection)


def _save(
    trainer: Trainer,
    writer: CheckpointWriter | DeferredWriter,
    facts: dict[str, Any] | None,
    collection: TableCollection | _RowsThen,
) -> None:
    writer.facts = {**(facts or {}), **save_dense(trainer, writer)}
    if trainer.lifecycle is not None:
        saved_lifetimes.write(writer, trainer.lifecycle.lifetimes.export(), _table_names(trainer.collection))
    format_of(trainer.collection.row_settings).save(writer, collection)


class Snapshot:
    """A trainer's state after a step, to be written while it trains on.

    Whole rows are copied only where training changes them before they are written (see `GroupSnapshot`);
    everything else, and pruned rows, are copied at once. Close it when it is written.
    """

    def __init__(self, trainer: Trainer, facts: dict[str, Any] | None = None) -> None:
        self._rows: _RowsThen | None = None
        self._changes: Changes | None = None
        collection, source = trainer.collection, trainer.collection.source
        if isinstance(source, CachedOverHost):
            self._rows = _RowsThen(collection, source.settled_tables())
        elif isinstance(source, LocalRows):
            self._rows = _RowsThen(collection, source.tables)
            self._changes = source.changes.seal() if source.changes is not None else None
            self._table_names = source.table_names()
        self._writer = DeferredWriter(copies_rows=self._rows is None)
        try:
            _save(trainer, self._writer, facts, self._rows or collection)
        except BaseException:
            self.close()
            raise

    def write(self, path: str | Place, pace: Pace = lambda: None) -> None:
        """Write it as a checkpoint, once, in any thread; ``pace`` is called between small pieces of work."""
        with CheckpointWriter(path) as writer:
            self._writer.write_to(writer, pace)
            writer.facts = self._writer.facts

    def is_crowded(self) -> bool:
        """Whether it should be written faster: training copies many rows."""
        return self._rows is not None and self._rows.is_crowded()

    def changed_since(self, step: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the rows that changed after a step, or were dropped since, as (table, keys).

        They are known from when `LocalRows.track_changes` was called on.
        """
        if self._changes is None:
            raise ConfigError(
                "changed_since() needs to know which rows change: call track_changes() on the collection's "
                "source before training; pruned rows are not tracked"
            )
        for table, keys in self._changes.since(step):
            yield self._table_names[table], keys

    def close(self) -> None:
        """Free the snapshot."""
        if self._rows is not None:
            self._rows.close()


class _RowsThen:
    """The rows of a collection as they were, in the form in which a row format asks for them."""

    def __init__(self, collection: TableCollection, groups: Sequence[TableGroup]) -> None:
        self.optimizer = collection.optimizer
        self.table_configs = collection.table_configs
        self._places = {
            spec.name: (number, position)
            for number, tables in enumerate(groups)
            for position, spec in enumerate(tables.tables)
        }
        self._groups: list[GroupSnapshot] = []
        try:
            for tables in groups:
                self._groups.append(tables.snapshot())
        except BaseException:
            self.close()
            raise

    def rows(self, table: str) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        number, position = self._places[table]
        return self._groups[number].blocks(position)

    stored_rows = rows  # packed ones are never asked for as numbers

    def is_crowded(self) -> bool:
        return any(group.is_crowded for group in self._groups)

    def close(self) -> None:
        for group in self._groups:
            group.close()


def save_dense(trainer: Trained, writer: CheckpointWriter | ShardWriter | DeferredWriter) -> dict[str, Any]:
    """Write all but the rows; returns the facts that go into the manifest."""
    writer.tensors("model", _dense_tensors(trainer.model))
    optimizer_tensors, optimizer_plain = split_state(portable_state(trainer.dense))
    writer.tensors("dense-optimizer", optimizer_tensors)
    writer.tensors("random", {"torch": torch.get_rng_state()})
    return {
        "step": trainer.step,
        "samples": trainer.samples,
        "threads": torch.get_num_threads(),
        **kind_facts(trainer.key_kinds),
        "model": trainer.model_name,
        "row_optimizer": trainer.collection.optimizer.name,
        "row_steps": [trainer.step],
        "dense_optimizer": optimizer_plain,
    }


def restore(trainer: Trainer, path: str | Place) -> CheckpointReader:
    """Load a checkpoint into a trainer; one of another model is refused before anything changes."""
    reader = CheckpointReader(path)
    restore_dense(trainer, reader)
    format_of(trainer.collection.row_settings).load(reader, trainer.collection)
    if trainer.lifecycle is not None:
        trainer.lifecycle.reset()
        known = saved_lifetimes.read(reader, _table_names(trainer.collection))
        if known is not None:
            trainer.lifecycle.lifetimes.restore(Saved(known))
        trainer.lifecycle.know_rows(trainer.step - 1)
    return reader


def restore_dense(trainer: Trained, reader: CheckpointReader) -> None:
    """Load all but the rows; a checkpoint of another model is refused before anything changes."""
    model_tensors = reader.tensors("model")
    _check_same_model(trainer, reader, model_tensors)
    plain, optimizer_tensors = reader.facts["dense_optimizer"], reader.tensors("dense-optimizer")
    random = reader.tensors("random")
    _load_dense(trainer.model, model_tensors)
    load_portable(trainer.dense, join_state(optimizer_tensors, plain))
    trainer.count_row_steps(reader.facts["row_steps"][0])
    torch.set_rng_state(random["torch"])
    trainer.step, trainer.samples = reader.facts["step"], reader.facts["samples"]
    trainer.key_kinds = kinds_in(reader.facts)


def _table_names(collection: TableCollection) -> list[str]:
    return [config.name for config in collection.table_configs()]


def _dense_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; embedding rows are neither."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _load_dense(model: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in _dense_tensors(model).items():
        tensor.copy_(tensors[name])


def _check_same_model(trainer: Trained, reader: CheckpointReader, tensors: dict[str, Tensor]) -> None:
    collection = trainer.collection
    ours_in = format_of(collection.row_settings)
    for table in reader.tables.values():
        if table.format != ours_in.name:
            raise CheckpointError(
                f"{reader.path} has {table.format} rows, and this model {ours_in.name} ones; use the "
                f"configuration it was trained with{convert_hint(reader.path, table.format, ours_in.name)}"
            )
    ours_in.check_loadable(reader, collection)
    ours = {
        f"table {config.name!r}": f"dim {config.embedding_dim}, {collection.optimizer.name}, "
        + str(config.data_type).removeprefix("torch.")
        for config in collection.table_configs()
    }
    ours |= {f"weight {name!r}": str(tuple(t.shape)) for name, t in _dense_tensors(trainer.model).items()}
    theirs = {
        f"table {table.name!r}": f"dim {table.dim}, {reader.facts['row_optimizer']}, {table.dtype}"
        for table in reader.tables.values()
    }
    theirs |= {f"weight {name!r}": str(tuple(tensor.shape)) for name, tensor in tensors.items()}
    for what in (*ours, *theirs):
        found, needed = theirs.get(what, "absent"), ours.get(what, "absent")
        if found != needed:
            raise CheckpointError(
                f"{reader.path} is of another model ({reader.facts['model']}): {what} is {found} there and "
                f"{needed} here ({trainer.model_name}); use the configuration it was trained with"
            )


def split_state(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name, and the plain values that JSON can hold."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"param_groups": state["param_groups"], "state": {}}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                plain["state"].setdefault(str(index), {})[name] = value
    return tensors, plain


def join_state(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `split_state`."""
    state: dict[int, dict[str, Any]] = {int(index): dict(rest) for index, rest in plain["state"].items()}
    for name, tensor in tensors.items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = tensor
    return {"state": state, "param_groups": plain["param_groups"]}
