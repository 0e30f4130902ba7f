"""What ranks tell each other of hot rows arrives whole, on those that are to know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from checkpointed_ranks import on_threads
from rowhaul.schedule import HotRows, Topology
from rowhaul.tuning.hot_set.broadcast import _send_state, broadcast_number, broadcast_sets

STATE = {"rows.key": np.arange(1000), "rows.table": np.zeros(1000, np.int32), "nothing": np.zeros(0)}


def sets(*sizes: int) -> list[HotRows]:
    return [HotRows(np.arange(size) % 2, 7 * np.arange(size)) for size in sizes]


@pytest.mark.parametrize("told", [[], sets(0), sets(3, 0, 50)], ids=["none", "an empty one", "three"])
def test_all_ranks_hear_of_the_sets_of_rank_0(told: list[HotRows]) -> None:
    def hear(cluster: Any) -> tuple[list[HotRows], int]:
        mine = told if cluster.rank == 0 else []
        return broadcast_sets(cluster.moves, mine), broadcast_number(cluster.moves, 5 - cluster.rank)

    for heard, number in on_threads(Topology(2, num_stores=1), hear):
        assert number == 5
        assert len(heard) == len(told)
        for one, other in zip(heard, told, strict=True):
            assert np.array_equal(one.tables, other.tables)
            assert np.array_equal(one.keys, other.keys)


@pytest.mark.parametrize("state", [STATE, None], ids=["a state", "too much to send"])
def test_rank_0_alone_is_told_the_state_of_its_scheduler(state: Any) -> None:
    def tell(cluster: Any) -> Any:
        return _send_state(cluster.moves, 2, state if cluster.rank == 2 else None)

    first, *others = on_threads(Topology(3, num_stores=1), tell)
    assert others == [None, None, None]
    if state is None:
        assert first is None
    else:
        assert first.keys() == state.keys()
        assert all(np.array_equal(first[name], state[name]) for name in state)
        assert all(first[name].dtype == state[name].dtype for name in state)
