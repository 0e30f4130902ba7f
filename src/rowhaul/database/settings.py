"""The settings of a database, from the forms in which users pass them: tables, dtype, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowhaul.errors import ConfigError
from rowhaul.optim import RowOptimizerRule, row_optimizer
from rowhaul.store.tables import TableSpec

INITIAL_RANGE = 0.01  # initial values are between minus and plus this unless the table says otherwise
DEFAULT_RATE = 0.01
_DTYPES = ("float32", "float64")
_TORCHREC_DTYPES = {"FP32": "float32", "FP64": "float64"}


@dataclass(frozen=True)
class DatabaseSettings:
    """Tables, row optimizer, dtype and seed of initial values; equal on all ranks."""

    tables: tuple[TableSpec, ...]
    optimizer: RowOptimizerRule
    dtype: str
    seed: int
    means: frozenset[str] = frozenset()  # tables whose bags are pooled by their mean, unless asked otherwise

    @classmethod
    def of(
        cls, tables: Any, optimizer: str | RowOptimizerRule, lr: float | None, dtype: Any, seed: int
    ) -> DatabaseSettings:
        """Check a user's arguments."""
        if not isinstance(seed, int):
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        given = _listed(tables)
        specs, found = _specs(given)
        means = frozenset(table.name for table in given if _pools_means(table))
        return cls(specs, _rule(optimizer, lr), _dtype_name(dtype, found), seed, means)

    def table(self, name: str) -> TableSpec:
        """Look up a table by name."""
        for spec in self.tables:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.tables)
        raise ConfigError(f"no table {name!r}; the tables are {known}")

    def state_width(self, spec: TableSpec) -> int:
        """Elements of optimizer state in a record of a table."""
        return self.optimizer.state_width(spec.dim)


def _listed(tables: Any) -> list[Any]:
    """The tables, one by one, as they were given."""
    given: list[Any]
    if isinstance(tables, Mapping):
        given = [TableSpec(name, dim, -INITIAL_RANGE, INITIAL_RANGE) for name, dim in tables.items()]
    elif isinstance(tables, Sequence) and not isinstance(tables, str):
        given = list(tables)
    else:
        given = [tables]
    if not given:
        raise ConfigError('a database needs a table; pass for example {"items": 16}')
    return given


def _specs(given: Sequence[Any]) -> tuple[tuple[TableSpec, ...], set[str]]:
    """The tables, and the dtypes that they ask for."""
    specs = tuple(_spec(table) for table in given)
    names = [spec.name for spec in specs]
    for spec in specs:
        _check(spec)
        if names.count(spec.name) > 1:
            raise ConfigError(f"two tables are called {spec.name!r}; give each table its own name")
    return specs, {_name_of(table.data_type) for table in given if hasattr(table, "data_type")}


def _pools_means(table: Any) -> bool:
    """Whether a table's configuration asks for the mean of a bag."""
    pooling = getattr(table, "pooling", None)
    return getattr(pooling, "value", pooling) == "MEAN"


def _name_of(data_type: Any) -> str:
    """The name of PyTorch's type, or of TorchRec's, which is an enumeration."""
    name = str(getattr(data_type, "value", data_type)).removeprefix("torch.")
    return _TORCHREC_DTYPES.get(name, name)


def _spec(table: Any) -> TableSpec:
    if isinstance(table, TableSpec):
        return table
    if not hasattr(table, "name") or not hasattr(table, "embedding_dim"):
        raise ConfigError(
            'tables are {"name": dim}, or a list of TableSpec or EmbeddingBagConfig; '
            f"got {type(table).__name__} {table!r}"
        )
    if getattr(table, "frozen", False):
        raise ConfigError(
            f"table {table.name!r} is frozen, but an embedding database trains all rows whose gradients are "
            "pushed; leave out frozen=True, and push none of this table"
        )
    if not hasattr(table, "initial_range"):  # TorchRec's, whose init_fn fills a whole table
        return TableSpec(table.name, table.embedding_dim, *_torchrec_range(table))
    low, high = table.initial_range
    return TableSpec(table.name, table.embedding_dim, low, high, getattr(table, "init_fn", None))


def _torchrec_range(table: Any) -> tuple[float, float]:
    """The ends of first values that a table of TorchRec's asks for, as `EmbeddingBagConfig` has them."""
    size = getattr(table, "num_embeddings", None)
    default = (1 / size) ** 0.5 if size else INITIAL_RANGE
    low, high = (getattr(table, f"weight_init_{end}", None) for end in ("min", "max"))
    return (-default if low is None else low), (default if high is None else high)


def _check(spec: TableSpec) -> None:
    if not isinstance(spec.name, str) or not spec.name:
        raise ConfigError(f"a table's name must be a non-empty string, got {spec.name!r}")
    if not isinstance(spec.dim, int) or isinstance(spec.dim, bool) or spec.dim < 1:
        raise ConfigError(
            f"table {spec.name!r}: the dim must be a whole number of at least 1, got {spec.dim!r}"
        )
    low, high = spec.initial_low, spec.initial_high
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise ConfigError(f"table {spec.name!r}: initial values cannot lie between {low} and {high}")


def _rule(optimizer: str | RowOptimizerRule, lr: float | None) -> RowOptimizerRule:
    if isinstance(optimizer, str):
        return row_optimizer(optimizer, lr=DEFAULT_RATE if lr is None else lr)
    if not isinstance(optimizer, RowOptimizerRule):
        raise ConfigError(f"optimizer must be a name or one of rowhaul.optim's rules, got {optimizer!r}")
    if lr is not None:
        raise ConfigError(f"{optimizer} already has a learning rate; pass lr only with an optimizer's name")
    return optimizer


def _dtype_name(dtype: Any, found: set[str]) -> str:
    if dtype is None:
        if len(found) > 1:
            raise ConfigError(f"tables of one database share a dtype, got {', '.join(sorted(found))}")
        dtype = next(iter(found), _DTYPES[0])
    try:
        name = str(dtype).removeprefix("torch.")
        name = name if name in _DTYPES else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be float32 or float64, got {dtype!r}")
    return name
