"""How a share to prune is spread over the places in a row, when it is not left to the utilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

POWER = 0.5  # the exponent: ratios rise steeply at first and then level off, as in FIITED's figure 7
CAP = 0.95  # no place in a row is pruned more than this, unless the whole must be


def ratios_by_place(shape: str, ratio: float, num_chunks: int) -> Floats:
    """The share to prune at each place in a row, later ones more, with ``ratio`` as their mean."""
    places = (np.arange(num_chunks) + 0.5) / num_chunks
    if shape == "linear":
        return ratio + 2 * (places - 0.5) * min(ratio, 1 - ratio) / 2
    return _power(places, ratio)


def _power(places: Floats, ratio: float) -> Floats:
    """``c * x**POWER`` cut at the cap, with ``c`` such that the mean is ``ratio`` all the same."""
    cap = max(CAP, ratio)
    low, high = 0.0, cap / float(places[0] ** POWER)
    for _ in range(200):  # bisection: the mean rises with c, and at `high` every place is at the cap
        middle = (low + high) / 2
        if float(np.minimum(cap, middle * places**POWER).mean()) < ratio:
            low = middle
        else:
            high = middle
    return np.minimum(cap, high * places**POWER)
