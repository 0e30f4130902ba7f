"""Search by all products: slow and exact, the answer that an index is measured against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_PRODUCTS = 1 << 24  # at a time: bounds memory


def exact_search(items: Floats, users: Floats, k: int) -> tuple[Int64s, Floats]:
    """Places of the ``k`` items with the largest products, best first (users x k), and the products.

    Of equal products the item that comes first wins. Fewer than k items: all of them.
    """
    check_k(k)
    k = min(k, len(items))
    places = np.empty((len(users), k), np.int64)
    scores = np.empty((len(users), k), np.float32)
    step = max(1, _PRODUCTS // max(1, len(items)))
    for first in range(0, len(users), step):
        products = users[first : first + step] @ items.T
        # Only those that reach the k-th largest are sorted; ties at the border are all among them.
        least = np.partition(products, len(items) - k, axis=1)[:, len(items) - k]
        for row, (one, border) in enumerate(zip(products, least, strict=True), first):
            reach = np.flatnonzero(one >= border)
            best = reach[np.argsort(-one[reach], kind="stable")[:k]]
            places[row], scores[row] = best, one[best]
    return places, scores


def recall(found: Int64s, exact: Int64s) -> float:
    """The share of the exact answer (users x k) that was found.

    Both are places, or both keys; -1 in them only fills answers that are too short.
    """
    pairs = zip(found, exact, strict=True)
    hits = sum(len(np.setdiff1d(np.intersect1d(one, other), [-1])) for one, other in pairs)
    return hits / max(1, int((np.asarray(exact) != -1).sum()))


def check_k(k: int) -> None:
    """Refuse numbers of items that cannot be searched for."""
    if not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k must be at least 1, a whole number; got {k!r}")
