"""Traces and settings on which the scheduler and the oracle are compared, drawn small or made long."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st
from naive import Batch, NaiveSettings
from naive_modes import naive_scheduler

from rowhaul.schedule import RowPolicy, Topology, home_of

POLICIES = ["lru", "lfu", "emark", "emark:frequency,latest,mark", "belady"]
KEYS = [0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1]


MODES = [
    ("on-demand", False),
    ("on-demand", True),
    ("full", True),
    ("static", False),
    ("bounded:0", False),
    ("bounded:1", False),
    ("bounded:3", False),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A trace and its settings, before they are told to either side."""

    topology: Topology
    naive: NaiveSettings
    shares: tuple[int, ...] | None
    batches: Sequence[Batch]
    assignments: Sequence[Sequence[int]]


def capacities(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Whole samples by largest remainders; ties go to the lower rank."""
    exact = [Fraction(num_samples * share, sum(shares)) for share in shares]
    whole = [int(quota) for quota in exact]
    largest = sorted(range(len(shares)), key=lambda w: (whole[w] - exact[w], w))
    for worker in largest[: num_samples - sum(whole)]:
        whole[worker] += 1
    return whole


def assignment(shuffle: random.Random, num_samples: int, shares: Sequence[int]) -> list[int]:
    """Workers drawn for the samples, each as often as it has room."""
    places = [worker for worker, room in enumerate(capacities(num_samples, shares)) for _ in range(room)]
    return shuffle.sample(places, num_samples)


row_policies = st.builds(
    RowPolicy,
    admit_after=st.sampled_from([1, 1, 1, 2, 3]),
    ttl=st.sampled_from([None, None, 1, 2, 3, 5]),
    max_rows=st.sampled_from([None, None, 1, 2, 4]),
    evict=st.sampled_from(["lru", "lfu"]),
)


@st.composite
def cases(draw: st.DrawFn, sync: str, peer_to_peer: bool) -> Case:
    num_workers = draw(st.integers(1, 6))
    topology = Topology(
        num_workers,
        num_stores=draw(st.integers(1, 3)),
        colocated=draw(st.booleans()),
        peer_to_peer=peer_to_peer,
    )
    num_tables = draw(st.integers(1, 2))
    row = st.tuples(st.integers(0, num_tables - 1), st.sampled_from(KEYS[: draw(st.integers(1, len(KEYS)))]))
    # Sizes are drawn first, evenly: lists left to themselves are short, and rows then rarely meet again.
    batches = [
        [draw(st.lists(row, max_size=3)) for _ in range(draw(st.integers(0, 8)))]
        for _ in range(draw(st.integers(1, 15)))
    ]
    shares = draw(
        st.none()
        | st.lists(st.integers(0, 3), min_size=num_workers, max_size=num_workers).filter(any).map(tuple)
    )
    shuffle = random.Random(draw(st.integers(0, 1000)))
    assignments = [assignment(shuffle, len(batch), shares or [1] * num_workers) for batch in batches]

    state_sizes = st.sampled_from([0, 0, 4, 12])
    naive = NaiveSettings(
        num_workers=num_workers,
        home=lambda row: home_of(*row, topology),
        values=tuple(draw(st.sampled_from([4, 8, 20])) for _ in range(num_tables)),
        state=tuple(draw(state_sizes) for _ in range(num_tables)),
        unit=draw(st.sampled_from(["rows", "bytes"])),
        policy=draw(st.sampled_from(POLICIES)),
        sync=sync,
        peer_to_peer=peer_to_peer,
        first_touch=draw(st.booleans()),
        policies=draw(st.just(()) | st.tuples(*[row_policies] * num_tables)),
        look_ahead=draw(st.sampled_from([0, 1, 1, 2, 2, 3])),
        hot=draw(st.just(frozenset()) | st.frozensets(row, max_size=3)),
    )
    slack = draw(st.lists(st.integers(0, 4), min_size=num_workers, max_size=num_workers))
    capacity = tuple(
        max(1, least + extra * (1 if naive.unit == "rows" else 7))
        for least, extra in zip(least_capacity(naive, batches, assignments), slack, strict=True)
    )
    return Case(topology, dataclasses.replace(naive, capacity=capacity), shares, batches, assignments)


def least_capacity(
    naive: NaiveSettings, batches: Sequence[Batch], assignments: Sequence[Sequence[int]]
) -> list[int]:
    """What each worker's rows of one iteration need at most; hot rows and rows kept out need nothing."""
    oracle = naive_scheduler(naive, batches, assignments)
    least = [0] * naive.num_workers
    for _ in batches:
        plan = oracle.plan()
        for worker in range(naive.num_workers):
            trained = [row for row in oracle.trained if worker in plan.trainers[row]]
            room = len(trained) if naive.unit == "rows" else sum(oracle.sizes(row)[1] for row in trained)
            least[worker] = max(least[worker], room)
    return least


def long_case(seed: int, sync: str, peer_to_peer: bool, num_workers: int = 4, num_batches: int = 40) -> Case:
    """A few rows per worker, again and again, in caches that hold no more than an iteration may need."""
    draw = random.Random(seed)
    topology = Topology(num_workers, num_stores=2, colocated=seed % 3 == 2, peer_to_peer=peer_to_peer)
    batches = [
        [
            [(draw.randrange(2), int(draw.paretovariate(0.7)) % 20) for _ in range(draw.randrange(1, 4))]
            for _ in range(2 * num_workers - draw.randrange(2))
        ]
        for _ in range(num_batches)
    ]
    assignments = [assignment(draw, len(batch), [1] * num_workers) for batch in batches]
    naive = NaiveSettings(
        num_workers=num_workers,
        home=lambda row: home_of(*row, topology),
        values=(8, 20),
        state=(0, 12) if seed % 2 else (4, 0),
        policy=POLICIES[seed % len(POLICIES)],
        unit="bytes" if seed % 4 == 3 else "rows",
        sync=sync,
        peer_to_peer=peer_to_peer,
        look_ahead=1 + seed % 3,
        hot=frozenset({(0, 1)}) if seed % 2 else frozenset(),
        admit_after=1 + seed % 2,
    )
    least = tuple(max(1, least) for least in least_capacity(naive, batches, assignments))
    return Case(topology, dataclasses.replace(naive, capacity=least), None, batches, assignments)


def forgetful_case(seed: int, sync: str, peer_to_peer: bool) -> Case:
    """The same, with tables that forget."""
    case = long_case(seed, sync, peer_to_peer)
    evict = "lfu" if seed % 2 else "lru"
    policies = (
        RowPolicy(1 + seed % 2, ttl=2 + seed),
        RowPolicy(1 + seed % 3, max_rows=3 + seed, evict=evict),
    )
    naive = dataclasses.replace(case.naive, admit_after=1, policies=policies, capacity=())
    least = tuple(max(1, least) for least in least_capacity(naive, case.batches, case.assignments))
    return dataclasses.replace(case, naive=dataclasses.replace(naive, capacity=least))
