"""The exact transportation problem: rows to columns of limited capacity, at the least total cost.

Dispatching samples to workers is one: the papers expand each worker into as many columns as it has
slots and run an assignment algorithm on the square matrix; with capacities the same optimum is
found thousands of times faster.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.transportation.solver import solve

__all__ = ["largest_cost", "solve", "transport"]


def transport(cost: npt.ArrayLike, capacity: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """The column of each row, no column taking more rows than its capacity, at the least total cost.

    Args:
        cost: Integers of at least 0, rows × columns.
        capacity: How many rows each column may take. They may differ and be 0; they add up to the
            rows or more.

    The answer depends on the arguments alone, also where several are optimal.

    >>> transport([[1, 9], [2, 4], [3, 9]], [2, 1])
    array([0, 1, 0], dtype=int32)
    """
    costs = _integers(cost, "costs", dimensions=2)
    capacities = _integers(capacity, "capacities", dimensions=1)
    num_rows, num_columns = costs.shape
    if num_columns == 0:
        raise ConfigError("the costs have no columns; at least one is needed")
    if len(capacities) != num_columns:
        raise ConfigError(f"{num_columns} columns of costs need as many capacities; got {len(capacities)}")
    total = int(np.minimum(capacities, num_rows).sum())
    if total < num_rows:
        raise ConfigError(f"the capacities add up to {total}, but {num_rows} rows need a place; raise them")
    if costs.size and costs.max() > largest_cost(num_columns):
        raise ConfigError(
            f"costs must be at most {largest_cost(num_columns)} with {num_columns} columns; "
            f"got {costs.max()} (divide them all by a common factor)"
        )
    worker = np.empty(num_rows, np.int32)
    solve(costs, capacities, worker, np.zeros(num_columns, np.int64))
    return worker


def largest_cost(num_columns: int) -> int:
    """The largest cost with which no price, a sum of costs along a path of columns, can overflow."""
    return int(2**57 // (num_columns + 1) ** 2)


def _integers(values: npt.ArrayLike, name: str, dimensions: int) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ConfigError(f"{name} must be integers; got {array.dtype} (scale and round them first)")
    if array.ndim != dimensions:
        raise ConfigError(f"{name} need {dimensions} dimension(s); got an array of shape {array.shape}")
    if array.size and array.min() < 0:
        raise ConfigError(f"{name} must not be negative; got {array.min()}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ConfigError(f"{name} must fit in 64-bit signed integers; got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)
