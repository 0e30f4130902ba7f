"""What each sample is expected to cost on each worker, priced alone (ESD, algorithm 1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.dispatch.cost_kernels import price_rows, sum_by_sample
from rowhaul.schedule.dispatch.task import DispatchTask


def row_costs(task: DispatchTask) -> npt.NDArray[np.int64]:
    """Rows x workers: what it costs to bring a row's latest record to one worker.

    Nothing where the worker holds it; else the pull, and the push of the worker that owns it. Owed
    gradients of split rows are pushed whoever trains, so they are no reason to choose and not counted.
    """
    costs: npt.NDArray[np.int64] = price_rows(
        task.latest, task.owner, task.free, task.home, task.record_size, task.prices, task.peer_to_peer
    )
    return costs


def expected_cost(task: DispatchTask) -> npt.NDArray[np.int64]:
    """Samples x workers: the costs of a sample's rows, as if no other sample were trained."""
    costs: npt.NDArray[np.int64] = sum_by_sample(task.offsets, task.rows, row_costs(task))
    return costs
