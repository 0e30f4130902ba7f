"""Clusters, models and data drawn at random, small and nasty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from training_case import Case, row_sizes

from rowhaul.data.samples import Samples
from rowhaul.errors import CacheTooSmallError
from rowhaul.nn import EmbeddingBagConfig, PoolingType
from rowhaul.optim import RowOptimizerRule, row_optimizer
from rowhaul.schedule import CacheSettings, HotRows, RowPolicy, ScheduleSettings, Topology

KEYS = (0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1, 7, 8, 9, 10, 11, 12)
DISPATCHERS = (
    "joint", "esd:0", "esd:0.5", "esd:1", "laia", "laia:threads=2", "laia-adaptive:1:2",
    "random", "round-robin", "brute-force", "two-batch:laia", "two-batch:joint",
)  # fmt: skip
POLICIES = ("lru", "lfu", "emark", "emark:frequency,latest,mark", "belady")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def changing_rate(iteration: int) -> float:
    """Another one in every step, so that a step with the wrong one shows."""
    return 0.3 / (1 + iteration % 7) + 0.01 * iteration


@st.composite
def topologies(draw: st.DrawFn, peer_to_peer: bool) -> Topology:
    num_workers, num_stores = draw(st.sampled_from([3, 4, 2, 3, 4, 1])), draw(st.integers(0, 3))
    return Topology(num_workers, num_stores, colocated=num_stores == 0, peer_to_peer=peer_to_peer)


@st.composite
def optimizers(draw: st.DrawFn, names: Sequence[str] = OPTIMIZERS) -> RowOptimizerRule:
    name = draw(st.sampled_from(names))
    settings = {"lr": 0.1, "weight_decay": draw(st.sampled_from([0.0, 0.01]))}
    if "adagrad" in name:
        settings["initial_accumulator_value"] = draw(st.sampled_from([1e-3, 0.1]))
    return row_optimizer(name, **settings)


@st.composite
def some_tables(draw: st.DrawFn, dims: tuple[int, ...] = (1, 2, 3)) -> tuple[EmbeddingBagConfig, ...]:
    """One to three tables; the first is read by two features."""
    return tuple(
        EmbeddingBagConfig(
            embedding_dim=draw(st.sampled_from(dims)),
            name=name,
            feature_names=features,
            pooling=draw(st.sampled_from(list(PoolingType))),
            weight_init_min=-1.0,
            weight_init_max=1.0,
        )
        for name, features in (("a", ["f0", "f1"]), ("b", ["f2"]), ("c", ["f3"]))[: draw(st.integers(1, 3))]
    )


@st.composite
def some_batches(draw: st.DrawFn, tables: tuple[EmbeddingBagConfig, ...]) -> tuple[Samples, ...]:
    """A few batches of one size and a last, shorter one, again and again; small ones may be of no sample."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    features = tuple(name for table in tables for name in table.feature_names)
    num_keys, most_ids = draw(st.sampled_from([12, 8, 6, 3])), draw(st.integers(1, 3))
    sizes = [draw(st.sampled_from([6, 8, 4, 7, 3, 1]))] * draw(st.sampled_from([4, 6, 5, 2, 1]))
    sizes.append(draw(st.integers(0, sizes[0])))
    epochs = draw(st.sampled_from([2, 3, 1]))
    once = [random_samples(rng, features, size, KEYS[:num_keys], most_ids) for size in sizes]
    return tuple(replace(samples, index=samples.index + 100 * e) for e in range(epochs) for samples in once)


def random_samples(
    rng: np.random.Generator, features: tuple[str, ...], size: int, keys: Sequence[int], most_ids: int
) -> Samples:
    """Bags of up to ``most_ids`` ids, the first keys much more often than the last."""
    lengths = rng.integers(0, most_ids + 1, (len(features), size)).astype(np.int32)
    drawn = np.minimum(rng.geometric(0.25, lengths.sum()) - 1, len(keys) - 1)
    return Samples(
        features,
        np.array(keys, np.int64)[drawn],
        lengths,
        rng.standard_normal((size, 2)).astype(np.float32),
        rng.integers(0, 2, size).astype(np.float32),
        np.arange(size),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    sync: str,
    peer_to_peer: bool = False,
    *,
    undecided: bool = False,
    row_dtype: str = "float32",
) -> Case:
    """All else is drawn; ``undecided``: without control records, whose moment nobody can know."""
    topology, optimizer = draw(topologies(peer_to_peer)), draw(optimizers())
    num_workers = topology.num_workers
    if row_dtype == "float32":
        tables, dtype = (
            draw(some_tables()), draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
        )  # fmt: skip
    else:  # with and without whole vectors of values
        tables, dtype = draw(some_tables((2, 3, 8, 21))), torch.float32
    batches = draw(some_batches(tables))
    settings = ScheduleSettings(
        topology=topology,
        sizes=row_sizes(tables, optimizer, dtype, row_dtype),
        prices=draw(_numbers(num_workers, 1, 10)),
        cache=CacheSettings(
            1 << 30, draw(st.sampled_from(["rows", "bytes"])), draw(st.sampled_from(POLICIES))
        ),
        dispatcher=draw(st.sampled_from(DISPATCHERS)),
        sync=sync,
        shares=draw(st.one_of(st.none(), st.none(), _numbers(num_workers, 0, 3).filter(any))),
        first_touch=draw(st.booleans()),
        policies=draw(_policies(len(tables))),
        look_ahead=draw(st.sampled_from([1, 2, 3, 4] if sync == "on-demand" else [1, 2, 3, 4, 0])),
        hot=draw(st.one_of(st.none(), st.none(), _hot_rows(len(tables)))),
        seed=draw(st.integers(0, 3)),
    )
    no_decisions = st.just({})
    decided = st.one_of(no_decisions, no_decisions, no_decisions, _decisions(num_workers, len(batches)))
    decisions = {} if undecided else draw(decided)
    case = Case(
        tables,
        optimizer,
        settings,
        batches,
        dtype,
        changing_rate,
        segments=draw(_segments(len(batches))),
        decisions=decisions,
        seed=draw(st.integers(0, 3)),
        early=draw(st.booleans()),
        row_dtype=row_dtype,
    )
    if decisions:
        return with_capacity(case, most_capacity(case))
    least = least_capacity(case)
    more = with_capacity(case, least, draw(_numbers(num_workers, 0, 2)))
    # With more room dispatchers may ask for even more.
    return more if _can_be_planned(more) else with_capacity(case, least)


def with_capacity(case: Case, capacity: int, more: tuple[int, ...] = ()) -> Case:
    """With caches of this size, and so many rows more in each."""
    row = 1 if case.settings.cache.unit == "rows" else max(case.settings.sizes.records)
    every = capacity if not more else tuple(capacity + extra * row for extra in more)
    return replace(case, settings=replace(case.settings, cache=replace(case.settings.cache, capacity=every)))


def most_capacity(case: Case) -> int:
    """The room that all rows of any one batch take."""
    in_bytes = case.settings.cache.unit == "bytes"
    most = 0
    for ids in case.id_batches():
        rows = set(zip(ids.tables.tolist(), ids.keys.tolist(), strict=True))
        most = max(most, sum(case.settings.sizes.records[table] if in_bytes else 1 for table, _ in rows))
    return most


def least_capacity(case: Case) -> int:
    """The smallest caches, of one size, that the case can be planned with, and none a little smaller."""
    capacity = most_capacity(case)
    while capacity > 0 and _fits(smaller := max(0, capacity - _step(case)), case):
        capacity = smaller
    return capacity


def too_small(case: Case) -> Case | None:
    """The case with caches that are a little too small for it; None where they can be of any size."""
    least = least_capacity(case)
    return None if least == 0 else with_capacity(case, max(0, least - _step(case)))


def _step(case: Case) -> int:
    return 1 if case.settings.cache.unit == "rows" else min(case.settings.sizes.values)


def _fits(capacity: int, case: Case) -> bool:
    return _can_be_planned(with_capacity(case, capacity))


def _can_be_planned(case: Case) -> bool:
    try:
        case.plans()
    except CacheTooSmallError:
        return False
    return True


def _numbers(count: int, least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(least, most)] * count)


def _policies(num_tables: int) -> st.SearchStrategy[tuple[RowPolicy, ...]]:
    """For half of the cases none; then some tables that keep all rows, and some that forget them soon."""
    policy = st.builds(
        RowPolicy,
        admit_after=st.sampled_from([1, 1, 1, 2, 3]),
        ttl=st.sampled_from([None, None, 1, 2, 3]),
        max_rows=st.sampled_from([None, None, 1, 3, 5]),
        evict=st.sampled_from(["lru", "lfu"]),
    )
    return st.just(()) | st.tuples(*[policy] * num_tables)


@st.composite
def _hot_rows(draw: st.DrawFn, num_tables: int) -> HotRows:
    row = st.tuples(st.integers(0, num_tables - 1), st.sampled_from(KEYS[:6]))
    rows = sorted(draw(st.sets(row, min_size=1, max_size=3)))
    return HotRows(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))


@st.composite
def _segments(draw: st.DrawFn, num_batches: int) -> tuple[int | None, ...]:
    """Where training is drained; sometimes after nothing, or again when there is nothing left."""
    ends = draw(st.lists(st.integers(0, num_batches), max_size=4)) if draw(st.booleans()) else []
    cuts = [0, *sorted(ends)]
    return (
        *(end - begin for begin, end in pairwise(cuts)),
        None,
        *draw(st.just(()) | st.just((None,))),
    )


@st.composite
def _decisions(
    draw: st.DrawFn, num_workers: int, num_batches: int
) -> dict[int, tuple[tuple[str, object], ...]]:
    decision = st.one_of(
        st.tuples(st.just("shares"), _numbers(num_workers, 0, 3).filter(any)),
        st.tuples(st.just("prices"), _numbers(num_workers, 1, 9)),
        st.tuples(st.just("dispatcher"), st.sampled_from(DISPATCHERS)),
    )
    moments = draw(st.sets(st.integers(-1, num_batches - 1), min_size=1, max_size=3))
    return {moment: tuple(draw(st.lists(decision, min_size=1, max_size=2))) for moment in sorted(moments)}
