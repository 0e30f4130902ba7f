"""Everything goes home before rows are pruned: split rows are stepped, owned ones pushed, caches emptied.

What settles rows for a checkpoint does it on copies (`rowhaul.runtime.flush`); here it is for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.flush import flush_plan
from rowhaul.runtime.mover import Job, Mover
from rowhaul.runtime.phases import RankPhases
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.topology import Topology


def flush_home_plan(states: Mapping[str, npt.NDArray[Any]], topology: Topology, sizes: RowSizes) -> Plan:
    """What brings every row home, from `Scheduler.states`; none of them is trained by it."""
    return replace(
        flush_plan(states, topology, sizes),
        tables=np.zeros(0, np.int32),
        keys=np.zeros(0, np.int64),
        trainers=np.zeros(0, np.uint64),
        states=np.zeros(0, np.uint8),
    )


def carry_out(mover: Mover, plan: Plan) -> int:
    """Bring the rows of one rank home and empty its cache; all ranks call it together. Returns bytes sent."""
    job = Job(plan, RankPhases(plan, mover.rank))
    mover.late(job)
    mover.wait_sent()
    if mover.cache is not None:
        mover.cache.clear()
    return job.num_bytes.total()
