"""Rowhaul trains recommendation models whose embedding tables outgrow one worker, exactly.

The names below are the public interface, with the sub-packages `rowhaul.nn`, `rowhaul.optim`,
`rowhaul.data`, `rowhaul.schedule`, `rowhaul.simulate`, `rowhaul.train`, `rowhaul.checkpoint` and
`rowhaul.cluster`. They are imported when first used, so that ``import rowhaul`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowhaul import checkpoint, cluster, data, errors, nn, optim, schedule, simulate, store, train
    from rowhaul.data.schema import Schema
    from rowhaul.data.stream import SampleStream
    from rowhaul.errors import RowhaulError
    from rowhaul.nn import (
        Batch,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        KeyedJaggedTensor,
        KeyedTensor,
        RowOptimizer,
    )
    from rowhaul.train.distributed import distribute

_HOME = {
    "Schema": "rowhaul.data.schema",
    "SampleStream": "rowhaul.data.stream",
    "RowhaulError": "rowhaul.errors",
    "Batch": "rowhaul.nn",
    "EmbeddingBagCollection": "rowhaul.nn",
    "EmbeddingBagConfig": "rowhaul.nn",
    "KeyedJaggedTensor": "rowhaul.nn",
    "KeyedTensor": "rowhaul.nn",
    "RowOptimizer": "rowhaul.nn",
    "distribute": "rowhaul.train.distributed",
}
_PACKAGES = (
    "checkpoint",
    "cluster",
    "data",
    "errors",
    "nn",
    "optim",
    "schedule",
    "simulate",
    "store",
    "train",
)

__all__ = [
    "Batch",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "RowOptimizer",
    "RowhaulError",
    "SampleStream",
    "Schema",
    "checkpoint",
    "cluster",
    "data",
    "distribute",
    "errors",
    "nn",
    "optim",
    "schedule",
    "simulate",
    "store",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"rowhaul.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rowhaul' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
