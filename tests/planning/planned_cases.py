"""Samples and schedules on which plans are made, shared and compared."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.planning.planner import Planner
from rowhaul.schedule import CacheSettings, RowSizes, Scheduler, ScheduleSettings, Topology

FEATURES = ("user", "item", "tags")


def settings(num_workers=2, **others):
    chosen = {
        "topology": Topology(num_workers),
        "sizes": RowSizes(values=(16, 16, 8), state=(16, 4, 0)),
        "prices": (1,) * num_workers,
        "cache": CacheSettings(capacity=200),
        "dispatcher": "random",
    }
    return ScheduleSettings(**chosen | others)


def samples(number, num_samples=8, *, labelled=True, num_keys=50):
    """The batch of this number, always the same."""
    draw = np.random.default_rng(number)
    lengths = draw.integers(0, 4, (len(FEATURES), num_samples)).astype(np.int32)
    return Samples(
        features=FEATURES,
        values=draw.integers(0, num_keys, lengths.sum()),
        lengths=lengths,
        dense=draw.random((num_samples, 2), np.float32),
        labels=draw.random(num_samples, np.float32) if labelled else None,
        index=number * num_samples + np.arange(num_samples),
    )


def planner(batches, failure=None, chosen=None, **options):
    """A planner of these batches, which may plan as far as ``options`` say."""
    return Planner(lambda ids: Scheduler(chosen or settings(), ids), batches, failure or Failure(), **options)


def all_plans(made):
    """Everything that a planner gives, after which it is closed."""
    try:
        return list(iter(made.next, None))
    finally:
        made.close()


MODES = [
    {},
    {"sync": "full"},
    {"sync": "static"},
    {"sync": "bounded:1"},
    {"look_ahead": 3, "topology": Topology(3, colocated=True), "prices": (1, 2, 3)},
    {"topology": Topology(2, num_stores=2, peer_to_peer=True), "first_touch": False},
]


_WEIGHTS = st.sampled_from([None, None, np.float32, np.float64])


@st.composite
def streams(draw):
    """Settings and a few batches: some empty, without ids, labels or dense values; ids may have weights."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    labelled, num_dense, weights = draw(st.booleans()), draw(st.integers(0, 2)), draw(_WEIGHTS)
    batches = []
    for number, size in enumerate(sizes):
        batch = samples(draw(st.integers(0, 10**6)), size, labelled=labelled, num_keys=12)
        if draw(st.integers(0, 4)) == 0:
            batch = dataclasses.replace(
                batch,
                values=batch.values[:0],
                lengths=np.zeros_like(batch.lengths),
                index=batch.index + number,
            )
        weighted = None if weights is None else np.arange(len(batch.values), dtype=weights) / 3
        batches.append(dataclasses.replace(batch, dense=batch.dense[:, :num_dense], id_weights=weighted))
    return draw(st.sampled_from(MODES)), batches


def assert_same(one, other):
    """Equal in everything, arrays in type, shape and values too."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        assert one.shape == other.shape
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other
