"""The transportation solver against SciPy's assignment of the expanded matrix, and against its own prices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from rowhaul.errors import ConfigError
from rowhaul.schedule.transportation import largest_cost, solve, transport

Ints = npt.NDArray[np.int64]


def total_cost(cost: Ints, worker: npt.NDArray[np.int32]) -> int:
    return int(cost[np.arange(len(cost)), worker].sum())


def least_cost_by_assignment(cost: Ints, capacity: Ints) -> int:
    expanded = np.repeat(cost, np.minimum(capacity, len(cost)), axis=1)
    rows, columns = linear_sum_assignment(expanded)
    return int(expanded[rows, columns].sum())


def solve_and_prove(cost: Ints, capacity: Ints, price: Ints | None = None) -> npt.NDArray[np.int32]:
    """Solve, and check by duality that nothing cheaper exists: no assumption on how it was found."""
    num_rows, num_columns = cost.shape
    worker = np.full(num_rows, -1, np.int32)
    price = np.zeros(num_columns, np.int64) if price is None else price
    solve(cost, capacity, worker, price)
    load = np.bincount(worker, minlength=num_columns)
    assert (load <= capacity).all()
    priced = cost + price
    assert (priced[np.arange(num_rows), worker] == priced.min(axis=1)).all()
    assert price.min() == 0
    assert (price[load < np.minimum(capacity, num_rows)] == 0).all()
    return worker


def link_like_costs(num_samples: int, num_workers: int, seed: int) -> Ints:
    """Costs as a dispatcher sees them: 26 rows a sample, some hot, half of the links ten times slower."""
    random = np.random.default_rng(seed)
    link = np.where(np.arange(num_workers) < num_workers // 2, 1, 10)
    cost = np.zeros((num_samples, num_workers), np.int64)
    for _ in range(26):
        num_keys = int(random.integers(3, 10_000))
        owner = random.integers(-1, num_workers, num_keys)[
            (num_keys * random.random(num_samples) ** 4).astype(int)
        ]
        push = np.where(owner >= 0, link[owner], 0)
        cost += np.where(owner[:, None] == np.arange(num_workers), 0, link + push[:, None])
    return cost


def costs_of_kind(kind: str, num_rows: int, num_columns: int) -> Ints:
    random = np.random.default_rng(7)
    match kind:
        case "random":
            return random.integers(0, 201, (num_rows, num_columns))
        case "ties":
            return random.integers(0, 4, (num_rows, num_columns))
        case "offset":
            return random.integers(0, 201, (num_rows, num_columns)) + 50 * np.arange(num_columns)
        case "links":
            return random.integers(0, 27, (num_rows, num_columns)) * np.resize([1, 10], num_columns)
        case "dispatch":
            return link_like_costs(num_rows, num_columns, seed=7)
        case "distinct":
            return random.integers(0, 10**9, (num_rows, num_columns))
        case "equal":
            return np.full((num_rows, num_columns), 5)
        case "sorted":
            return np.sort(random.integers(0, 10**6, (num_rows, 1)), axis=0) * np.arange(num_columns)
    raise ValueError(kind)


KINDS = ["random", "ties", "offset", "links", "dispatch", "distinct", "equal", "sorted"]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Ints, Ints]:
    capacity = np.array(draw(st.lists(st.integers(0, 12), min_size=1, max_size=6)), np.int64)
    num_rows = draw(st.one_of(st.just(int(capacity.sum())), st.integers(0, int(capacity.sum()))))
    highest = draw(st.sampled_from([0, 1, 3, 20, 10**6]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    cost = random.integers(0, highest + 1, (num_rows, len(capacity)))
    return cost * random.integers(1, draw(st.integers(2, 12)), len(capacity)), capacity


@given(problems())
@settings(max_examples=300)
def test_costs_no_more_than_the_assignment_of_the_expanded_matrix(problem: tuple[Ints, Ints]) -> None:
    cost, capacity = problem
    worker = transport(cost, capacity)
    assert (np.bincount(worker, minlength=len(capacity)) <= capacity).all()
    assert total_cost(cost, worker) == least_cost_by_assignment(cost, capacity)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [(300, 300, 300), (700, 150, 50), (900, 0, 900)])
def test_samples_and_limits_lead_to_the_same_optimum(kind: str, capacity: tuple[int, ...]) -> None:
    cost = costs_of_kind(kind, 900, 3)
    worker = solve_and_prove(cost, np.array(capacity))
    assert total_cost(cost, worker) == least_cost_by_assignment(cost, np.array(capacity))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1024, 8), (8192, 8), (5000, 64), (4099, 13)])
def test_large_problems_are_proved_optimal_by_their_prices(
    kind: str, num_rows: int, num_columns: int
) -> None:
    cost = costs_of_kind(kind, num_rows, num_columns)
    share = -(-num_rows // num_columns)
    full = np.full(num_columns, share)
    full[-1] -= full.sum() - num_rows
    roomy = np.full(num_columns, share + share // 10)
    uneven = np.where(np.arange(num_columns) % 2 == 0, 2 * share, 0)
    for capacity in (full, roomy, uneven + 1):
        solve_and_prove(cost, capacity)


@pytest.mark.parametrize("kind", KINDS)
def test_starting_prices_change_the_time_but_not_the_optimum(kind: str) -> None:
    cost, capacity = costs_of_kind(kind, 700, 6), np.full(6, 120)
    expected = total_cost(cost, transport(cost, capacity))
    price = np.zeros(6, np.int64)
    for seed in range(3):
        assert total_cost(cost, solve_and_prove(cost, capacity, price)) == expected  # from optimal prices
        price = np.random.default_rng(seed).integers(0, 1000, 6)


def test_the_largest_costs_do_not_overflow() -> None:
    for num_columns in (2, 8, 64):
        highest = largest_cost(num_columns)
        random = np.random.default_rng(num_columns)
        capacity = np.full(num_columns, 20)
        cost = random.integers(0, highest + 1, (20 * num_columns, num_columns))
        solve_and_prove(cost, capacity)
        # Chains of indifference, which drive prices up as far as they go.
        steps = np.where(np.eye(num_columns, k=-1, dtype=bool) | np.eye(num_columns, dtype=bool), 0, highest)
        steps[:, 0] = np.arange(num_columns) * (highest // num_columns)
        solve_and_prove(np.repeat(steps, 20, axis=0).astype(np.int64), capacity)


def test_the_answer_depends_on_the_values_alone() -> None:
    cost, capacity = costs_of_kind("ties", 600, 5), np.full(5, 130)
    before = cost.copy()
    worker = transport(cost, capacity)
    assert worker.dtype == np.int32
    assert (transport(np.asfortranarray(cost), list(capacity)) == worker).all()
    assert (transport(cost.astype(np.uint8), capacity.astype(np.int16)) == worker).all()
    assert (cost == before).all()


def test_tiny_problems() -> None:
    assert transport(np.zeros((0, 3), np.int64), [0, 0, 0]).shape == (0,)
    assert transport([[5], [7]], [2]).tolist() == [0, 0]
    assert transport([[0, 9]], [0, 1]).tolist() == [1]
    assert transport([[0, 9]], [2**62, 2**62]).tolist() == [0]


@pytest.mark.parametrize(
    ("cost", "capacity", "message"),
    [
        ([[1, 2], [3, 4]], [1, 0], "add up to 1, but 2 rows"),
        ([[1, 2]], [2, -1], "capacities must not be negative; got -1"),
        ([[1, 2]], [1], "2 columns of costs need as many capacities; got 1"),
        ([[1, -2]], [1, 1], "costs must not be negative; got -2"),
        ([[1.0, float("nan")]], [1, 1], "costs must be integers; got float64"),
        ([[1, 2]], [1.0, 1.0], "capacities must be integers; got float64"),
        ([1, 2], [1, 1], r"costs need 2 dimension\(s\); got an array of shape \(2,\)"),
        ([[1, 2]], [[1, 1]], r"capacities need 1 dimension\(s\); got an array of shape \(1, 2\)"),
        (np.zeros((2, 0), np.int64), np.zeros(0, np.int64), "no columns"),
        ([[largest_cost(2) + 1, 0]], [1, 1], "costs must be at most"),
        (np.array([[2**63]], np.uint64), [1], "costs must fit in 64-bit signed integers"),
    ],
)
def test_bad_input_is_refused(cost: npt.ArrayLike, capacity: npt.ArrayLike, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transport(cost, capacity)
