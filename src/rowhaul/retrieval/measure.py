"""How much of the exact answer an index finds, and how often a user's own item is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rowhaul.data.samples import Samples
from rowhaul.errors import ConfigError
from rowhaul.retrieval.index import ItemIndex
from rowhaul.retrieval.search import Int64s, exact_search, recall
from rowhaul.retrieval.vectors import item_keys, two_tower, user_vectors
from rowhaul.train.trainer import Trainer


@dataclass(frozen=True)
class IndexQuality:
    """Measured over some users."""

    k: int
    users: int
    recall: float  # of the k best items by all products
    hit_rate: float | None  # users whose own item, of a sample with label 1, is among the k; None: no such


def measure_index(
    index: ItemIndex, trainer: Trainer, data: Any, k: int = 100, users: int = 1000
) -> IndexQuality:
    """Search for the users of the first samples, and compare with all products."""
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}")
    if users < 1:
        raise ConfigError(f"at least one user is needed to measure with, got {users}")
    name, done, shares = two_tower(trainer).item[0], 0, 0.0
    hits: list[bool] = []
    for samples, vectors in user_vectors(trainer, data):
        vectors = vectors[: users - done]
        exact, _ = exact_search(index.vectors, vectors, k)
        found, _ = index.search_places(vectors, k)
        shares += recall(found, exact) * len(vectors)
        done += len(vectors)
        hits += _own_items_found(index, samples, name, found)
        if done >= users:
            break
    rate = sum(hits) / len(hits) if hits else None
    return IndexQuality(min(k, len(index.keys)), done, shares / max(1, done), rate)


def _own_items_found(index: ItemIndex, samples: Samples, name: str, found: Int64s) -> list[bool]:
    """Whether the item of each sample with label 1 was found; samples without an item are left out."""
    if samples.labels is None:
        return []
    has_item = samples.lengths[samples.features.index(name), : len(found)] > 0
    liked = samples.labels.reshape(len(samples), -1)[: len(found), 0] > 0
    places = np.flatnonzero(has_item & liked)
    own = item_keys(samples.take(places), name)
    best = found[places]
    is_own = (index.keys[np.maximum(best, 0)] == own[:, None]) & (best >= 0)
    hits: list[bool] = is_own.any(axis=1).tolist()
    return hits
