"""`TableCollection`: what collections of embedding tables share, pooled or not.

Rows are not parameters: a collection reads them from a `RowSource`, the backward pass leaves one summed
gradient per distinct row there, and `RowOptimizer` steps the records themselves. Nothing the size of a
table is ever built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from rowhaul._quantities import parse_bytes
from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingConfig
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor, as_keyed_jagged
from rowhaul.nn.local_rows import LocalRows
from rowhaul.nn.named_rows import NamedRows
from rowhaul.nn.row_source import Floats, Int64s, MovableRows, RowReader, RowSettings, RowSource
from rowhaul.optim import Adagrad, RowOptimizerRule
from rowhaul.store.tables import ON_UNKNOWN

_STEPS = "steps"  # in a state dict, beside names of tables with a dot and what of them it is


class TableCollection(nn.Module):
    """Tables, their rows and their optimizer; see `EmbeddingBagCollection` for the arguments.

    Args:
        groups: the features as a row source is made for them.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        groups: Sequence[FeatureGroup],
        device: torch.device | str | None,
        optimizer: RowOptimizerRule | None,
        seed: int,
        on_unknown: str,
        row_settings: RowSettings | None,
        device_memory: int | str = 0,
    ) -> None:
        super().__init__()
        if on_unknown not in ON_UNKNOWN:
            raise ConfigError(f"on_unknown must be one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}")
        if not isinstance(optimizer, RowOptimizerRule | None):
            raise ConfigError(
                "optimizer must be one of rowhaul.optim's, such as rowhaul.optim.Adam(lr=0.01), "
                f"got {optimizer!r}"
            )
        if not isinstance(seed, int | np.integer):
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        seed = int(seed)  # NumPy's overflow
        self.optimizer = optimizer if optimizer is not None else Adagrad(lr=0.01)
        self.seed, self.on_unknown = seed, on_unknown
        self.row_settings = row_settings
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self.device_memory = (
            parse_bytes(device_memory, "device_memory") if isinstance(device_memory, str) else device_memory
        )
        self._configs, self._groups = list(tables), list(groups)
        self._check_init_fn()
        frozen = [config.name for config in tables if config.frozen]
        if frozen and self.optimizer.weight_decay:
            raise ConfigError(
                f"table {frozen[0]!r} is frozen, but weight_decay is {self.optimizer.weight_decay}, which "
                "changes rows without a gradient; set it to 0, or give frozen tables their own collection"
            )
        self._source: RowSource
        if self.row_settings is None:
            self._source = LocalRows(self._groups, self.optimizer, seed)
        else:
            self._source = self.row_settings.make_rows(self._groups, self.optimizer, seed, on_unknown)
        if isinstance(self._source, MovableRows) and self._source.device != self.device:
            self._source = self._moved(self._source)
        self._reader: RowReader = self._source
        self.steps = 0  # how many its rows have taken, which Adam's corrections go by
        self.loaded_steps: int | None = None  # their number in a state dict that no step has followed yet
        # Backward reaches the rows through this: autograd needs an input that requires a gradient.
        self.anchor = torch.zeros((), requires_grad=True)

    @property
    def source(self) -> RowSource:
        """Where rows come from."""
        return self._source

    @property
    def feature_groups(self) -> list[FeatureGroup]:
        """The features by row size of their tables: what a row source is made for."""
        return self._groups

    def read_from(self, source: RowSource) -> None:
        """Read rows from another source from now on; those of the old one are left behind."""
        self._source.drop_gradients()
        self._source = self._reader = source

    @contextmanager
    def reading(self, reader: RowReader) -> Iterator[None]:
        """Read rows from elsewhere for a while; the source is left as it is."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = self._source

    def table_configs(self) -> Sequence[EmbeddingConfig]:
        """The tables, in order."""
        return self._configs

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state and index."""
        return self._source.allocated_bytes

    def num_rows(self, table: str) -> int:
        """Count the rows that a table holds now."""
        return self._source.num_rows(table)

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, records); a record is values, then optimizer state.

        Records of pruned tables are whole values alone, zeros where pruned.
        """
        return self._source.rows(table)

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Set rows of a table, creating those it lacks; the inverse of `rows`, but for rounding."""
        self._source.load_rows(table, keys, records)

    def stored_rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as they are stored: rows in fewer bits as bytes, see `RowPacking`."""
        return self._stored_source().stored_rows(table)

    def load_stored(self, table: str, keys: Int64s, stored: Floats) -> None:
        """Set rows of a table to the bit; the inverse of `stored_rows`."""
        self._stored_source().load_stored(table, keys, stored)

    def _stored_source(self) -> NamedRows:
        if not isinstance(self._source, NamedRows):
            raise ConfigError("only rows of this process that are not pruned can be read as they are stored")
        return self._source

    def clear(self) -> None:
        """Drop every row of every table, and gradients that no step has used."""
        self._source.clear()
        self.steps, self.loaded_steps = 0, None

    def _ids(self, features: Any) -> KeyedJaggedTensor:
        """Check the ids of a batch."""
        ids = as_keyed_jagged(features)
        if ids.values().dtype not in (torch.int64, torch.int32) or ids.values().dim() != 1:
            raise ConfigError(
                f"keys must be int64 in one dimension, got {ids.values().dtype} "
                f"of shape {tuple(ids.values().shape)}"
            )
        return ids

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Look up the rows of a batch that comes later, in any thread, beside training on others.

        Reading the same object later then takes less time and gives the same bits, whatever came in between.
        Its ids must not be changed meanwhile. Sources that gain nothing by it do nothing.
        """
        self._source.locate_early(features)

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Announce a batch that is read in parts before the next step.

        Pruned rows are admitted and counted by batch: they are then the same as if it were read whole.
        """
        self._source.announce(features)

    def apply_gradients(self, lr: float, number: int) -> None:
        """Step every row touched since the last call; ``number`` counts steps from 1."""
        self._source.step(lr, number)
        self.steps, self.loaded_steps = number, None

    def drop_gradients(self) -> None:
        """Drop row gradients that were not applied."""
        self._source.drop_gradients()

    def _check_init_fn(self) -> None:
        """Refuse functions for first values where rows are not whole, or begin on a card."""
        named = [config.name for config in self._configs if config.init_fn is not None]
        how = getattr(self.row_settings, "row_format", "whole")
        if named and (how != "whole" or self.device.type != "cpu"):
            raise ConfigError(
                f"table {named[0]!r} has an init_fn, which is called for whole rows in host memory; these "
                f"are {how} on {self.device}: use weight_init_min and weight_init_max, or load_pretrained"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # After model.to("cuda") whole rows are there; others stay in host memory, and vectors go there.
        self.device = fn(torch.empty(0)).device
        self._check_init_fn()
        if isinstance(self._source, MovableRows) and self._source.device != self.device:
            self.read_from(self._moved(self._source))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's method has no types

    def _moved(self, source: MovableRows) -> RowSource:
        return source.moved_to(self.device, self._groups, self.optimizer, self.seed, self.device_memory)

    def extra_repr(self) -> str:
        """The tables, for ``print(model)``."""
        tables = ", ".join(f"{config.name}: {config.embedding_dim}" for config in self._configs)
        return f"{{{tables}}}, optimizer={self.optimizer}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, array in self._source.state().items():
            destination[f"{prefix}{name}"] = torch.from_numpy(array.copy())
        destination[f"{prefix}{_STEPS}"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing, *_ = arguments
        names = self._source.state_names()
        absent = [prefix + name for name in names if prefix + name not in state_dict]
        missing += absent
        steps = state_dict.pop(prefix + _STEPS, None)  # state dicts of earlier versions have none
        if not absent:  # all or nothing: rows are replaced only when all are there
            self._source.load_state({name: state_dict.pop(prefix + name).cpu().numpy() for name in names})
            if steps is not None:
                self.steps = self.loaded_steps = int(steps)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def check_tables(owner: str, tables: Sequence[EmbeddingConfig], kind: type[EmbeddingConfig]) -> None:
    """Refuse tables that one collection cannot hold; ``kind`` is its configuration's class."""
    if not isinstance(tables, Sequence):
        raise ConfigError(
            f"{owner} needs a list of {kind.__name__}, got {tables!r}; put it in brackets: [...]"
        )
    if not tables:
        raise ConfigError(f"{owner}: no tables; give at least one {kind.__name__}")
    for config in tables:
        if type(config) is not kind:
            raise ConfigError(f"{owner} needs an {kind.__name__} a table, got {type(config).__name__}")
    names = [config.name for config in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two tables are called {twice[0]!r}; give every table its own name")
    if len({config.data_type for config in tables}) > 1:
        raise ConfigError("tables of one collection must share a data_type; make one collection for each")


def chosen_settings(pruning: RowSettings | None, row_settings: RowSettings | None) -> RowSettings | None:
    """Return how rows are held, given in one of two ways."""
    if pruning is not None and row_settings is not None:
        raise ConfigError("both pruning and row_settings say how rows are held; give one of them")
    return pruning if pruning is not None else row_settings


def output_names(tables: Sequence[EmbeddingConfig]) -> list[str]:
    """Names of the features in the order of tables; ``feature@table`` for one that reads several."""
    features = [feature for config in tables for feature in config.feature_names]
    shared = {feature for feature in features if features.count(feature) > 1}
    return [
        f"{feature}@{config.name}" if feature in shared else feature
        for config in tables
        for feature in config.feature_names
    ]
