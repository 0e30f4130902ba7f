"""Row optimizers: one implementation for a single process, a worker's cache and a home store."""

from rowhaul.optim.rules import (
    ROW_OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    RecordMemory,
    RowOptimizerRule,
    RowwiseAdagrad,
    row_optimizer,
)

__all__ = [
    "ROW_OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "RecordMemory",
    "RowOptimizerRule",
    "RowwiseAdagrad",
    "row_optimizer",
]
