"""Moves and sums that are run to know what they take: the same numbers everywhere, over rows that travel."""

from __future__ import annotations

import pytest

from rowhaul.optim import row_optimizer
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import Topology
from rowhaul.store import TableSpec
from rowhaul.transport.base import Collective, Links
from rowhaul.transport.in_process import InProcessNetwork
from rowhaul.tuning import move_costs as collectives
from rowhaul.tuning.move_costs import LEAST_SIZES, CollectiveTimes, measure_collectives
from transport_ranks import run_threads

LAYOUT = TableLayout(
    (TableSpec("a", 4, -1.0, 1.0), TableSpec("b", 8, -1.0, 1.0)),
    row_optimizer("adagrad", lr=0.1),
    "float32",
    0,
)


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SPREAD_ROWS", 2048)


def measured(topology: Topology) -> list[CollectiveTimes]:
    network = InProcessNetwork(topology.num_ranks)
    dense = [network.collective(rank, range(topology.num_workers)) for rank in range(topology.num_workers)]

    def measure(links: Links, control: Collective) -> CollectiveTimes:
        own = dense[links.rank] if links.rank < topology.num_workers else None
        return measure_collectives(topology, LAYOUT, links, own, control, seconds=0.02)

    return run_threads(topology.num_ranks, measure)


@pytest.mark.parametrize(
    "topology", [Topology(3, colocated=True), Topology(2, num_stores=2), Topology(1, colocated=True)]
)
def test_every_rank_knows_the_same_times(topology: Topology) -> None:
    first, *others = measured(topology)
    for kind in ("moves", "sums"):
        timed = getattr(first, kind)
        assert len(timed) >= LEAST_SIZES
        assert all(one.seconds > 0 and one.cpu_seconds >= 0 for one in timed)
        for other in others:
            assert [one.seconds for one in getattr(other, kind)] == [one.seconds for one in timed]
    sizes = [one.plan.all_reduce_bytes for one in first.sums]
    assert sizes == sorted(set(sizes))
    assert sizes[0] > 0


def test_long_rows_are_as_many_as_the_trials_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SPREAD_BYTES", 100 * LAYOUT.sizes().records[0])
    assert len(measured(Topology(3, colocated=True))[0].moves) >= LEAST_SIZES


def test_all_workers_push_to_and_pull_from_all_that_store() -> None:
    topology = Topology(2, num_stores=2)
    times = measured(topology)[0]
    moves = times.moves[0].plan.moves
    pairs = set(zip(moves.source.tolist(), moves.target.tolist(), strict=True))
    assert pairs == {(worker, store) for worker in (0, 1) for store in (2, 3)} | {
        (store, worker) for worker in (0, 1) for store in (2, 3)
    }
    assert (moves.num_bytes == LAYOUT.sizes().values[0]).all()
