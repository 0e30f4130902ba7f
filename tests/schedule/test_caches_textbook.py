"""One worker, one row at a time: the policies are the ones of the textbooks."""

from collections import Counter, OrderedDict

import numpy as np
import pytest

from rowhaul.schedule.caches import Caches

NUM_KEYS = 200


def trace():
    rng = np.random.default_rng(3)
    return (NUM_KEYS * rng.random(1500) ** 3).astype(int).tolist()


def next_uses(keys):
    """Position of the next use of each access, or 0."""
    upcoming, at = {}, []
    for i in range(len(keys) - 1, -1, -1):
        at.append(upcoming.get(keys[i], 0))
        upcoming[keys[i]] = i
    return at[::-1]


def hits_of(policy, keys, capacity):
    caches = Caches([capacity], "rows", policy)
    caches.use_heads(np.full(NUM_KEYS, -1, np.int32))
    one, size = np.ones(1, np.uint64), np.ones(NUM_KEYS, np.int64)
    later, next_use = next_uses(keys), np.zeros(NUM_KEYS, np.int32)
    for key in set(keys):
        next_use[key] = keys.index(key)  # a window over the whole trace
    hits = 0
    for i, key in enumerate(keys):
        hits += caches.head[key] >= 0
        next_use[key] = later[i]
        caches.step(i, np.array([key], np.int32), one, one, size, next_use)
    return hits


def textbook_lru(keys, capacity):
    cache, hits = OrderedDict(), 0
    for key in keys:
        hits += key in cache
        cache[key] = True
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def textbook_lfu(keys, capacity):
    """In-cache frequencies, ties to the least recently used."""
    uses, last, hits = Counter(), {}, 0
    for i, key in enumerate(keys):
        hits += key in uses
        if key not in uses and len(uses) == capacity:
            del uses[min(uses, key=lambda other: (uses[other], last[other]))]
        uses[key] += 1
        last[key] = i
    return hits


def textbook_optimum(keys, capacity):
    """Belady's: the row whose next use is farthest, or never, makes room."""
    later, cache, hits = next_uses(keys), {}, 0
    for i, key in enumerate(keys):
        hits += key in cache
        if key not in cache and len(cache) == capacity:
            del cache[max(cache, key=lambda other: cache[other] or len(keys))]
        cache[key] = later[i]
    return hits


@pytest.mark.parametrize("capacity", [1, 2, 17, 60, NUM_KEYS])
@pytest.mark.parametrize(
    ("policy", "textbook"), [("lru", textbook_lru), ("lfu", textbook_lfu), ("belady", textbook_optimum)]
)
def test_as_many_hits_as_the_textbook(policy, textbook, capacity):
    keys = trace()
    assert hits_of(policy, keys, capacity) == textbook(keys, capacity)


def test_outdated_copies_go_before_older_ones():
    """Emark's point: worker 0 gives up the row that worker 1 trained since, though it used it last."""
    caches = Caches([2, 2], "rows", "emark")
    caches.use_heads(np.full(3, -1, np.int32))
    size, no_use = np.ones(3, np.int64), np.zeros(3, np.int32)

    def train(iteration, slot, workers, current):
        masks = np.array([workers], np.uint64), np.array([current], np.uint64)
        return caches.step(iteration, np.array([slot], np.int32), *masks, size, no_use)

    train(0, 0, 0b01, 0b01)
    train(1, 1, 0b01, 0b01)
    train(2, 1, 0b10, 0b10)
    evictions = train(3, 2, 0b01, 0b01)
    assert (evictions.workers.tolist(), evictions.slots.tolist()) == ([0], [1])
