"""Configuration of embedding tables, with TorchRec's names and argument order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

import torch

from rowhaul.errors import ConfigError
from rowhaul.store.tables import InitFn

# Rows of a table of unknown size start this close to zero.
DEFAULT_INITIAL_RANGE = 0.01

_DTYPES = {"FP32": torch.float32, "FP64": torch.float64}


@unique
class PoolingType(Enum):
    """How the rows of a bag become one vector."""

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass(frozen=True)
class EmbeddingConfig:
    """One table whose rows are read one by one, not pooled: its row size and its features.

    Unlike TorchRec's, a table has no size: any int64 is a key and its row is created on first
    sight. ``num_embeddings`` only sets the default initial range, ±sqrt(1 / num_embeddings).

    Args:
        num_embeddings: expected number of rows, if known.
        embedding_dim: values in a row, any number from 1.
        name: the table's name; with the seed and the key it determines a row's initial values.
        data_type: ``torch.float32`` or ``torch.float64`` (TorchRec's ``DataType`` is accepted).
        feature_names: features that read this table.
        weight_init_max: upper end of the initial range.
        weight_init_min: lower end of the initial range.
        init_fn: first values instead of a range: a function of (seed, keys) that returns keys × dim values,
            each row from the seed and its key alone, the same on every rank. Unlike TorchRec's, it is called
            with the keys of new rows, since there is no table to fill. For whole rows in host memory.
        frozen: rows are read and take no gradient, as pretrained ones that only the rest learns from. They
            never change, unless a state is loaded in which Adam trained them: its momentum carries them on.

    Example:
        >>> EmbeddingConfig(embedding_dim=16, name="items", feature_names=["item", "history"])
    """

    num_embeddings: int | None = None
    embedding_dim: int = 0
    name: str = ""
    data_type: Any = torch.float32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: InitFn | None = field(default=None, kw_only=True)
    frozen: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(f"{type(self).__name__}: a table needs a name")
        where = f"table {self.name!r}"
        if self.num_embeddings is not None and self.num_embeddings < 1:
            raise ConfigError(
                f"{where}: num_embeddings must be at least 1 or None, got {self.num_embeddings}"
            )
        if not isinstance(self.embedding_dim, int) or self.embedding_dim < 1:
            raise ConfigError(
                f"{where}: embedding_dim must be an int of at least 1, got {self.embedding_dim!r}"
            )
        features: Any = self.feature_names
        if isinstance(features, str):  # would be read letter by letter
            raise ConfigError(
                f"{where}: feature_names must be a list such as [{features!r}], got {features!r}"
            )
        if not self.feature_names:
            raise ConfigError(f"{where}: feature_names is empty; name the features that read this table")
        dtype = _DTYPES.get(getattr(self.data_type, "value", self.data_type), self.data_type)
        if dtype not in _DTYPES.values():
            raise ConfigError(f"{where}: data_type must be float32 or float64, got {self.data_type!r}")
        object.__setattr__(self, "data_type", dtype)
        low, high = self.initial_range
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ConfigError(f"{where}: weight_init_min {low} must not exceed weight_init_max {high}")

    @property
    def initial_range(self) -> tuple[float, float]:
        """Ends of the uniform distribution of a new row's values."""
        default = (1 / self.num_embeddings) ** 0.5 if self.num_embeddings else DEFAULT_INITIAL_RANGE
        low = self.weight_init_min if self.weight_init_min is not None else -default
        high = self.weight_init_max if self.weight_init_max is not None else default
        return low, high


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table: its row size, its features, how bags are pooled.

    Args:
        pooling: sum or mean over the ids of a bag; an empty bag gives zeros. The others are those of
            `EmbeddingConfig`.

    Example:
        >>> EmbeddingBagConfig(embedding_dim=16, name="items", feature_names=["item", "last_item"])
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            pooling = PoolingType(getattr(self.pooling, "value", self.pooling))
        except ValueError:
            raise ConfigError(
                f"table {self.name!r}: pooling must be SUM or MEAN, got {self.pooling!r}"
            ) from None
        object.__setattr__(self, "pooling", pooling)
