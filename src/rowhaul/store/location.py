"""Where a row's record is, in 64 bits: the rank that stores it and the record's number there.

Which rank knows a key and which one stores its record may differ, so that rows can migrate. In training
every rank finds its own records only: rank 0 in the packing, which makes a location a plain record number.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

RECORD_BITS = 48
RANK_BITS = 15  # one bit is left: locations are not negative
ABSENT = -1  # what an index says of a key that it does not hold

Locations = TypeVar("Locations", int, npt.NDArray[np.int64])


def pack(rank: Locations, record: Locations) -> Locations:
    """The location of a record of a rank; numbers or arrays."""
    return (rank << RECORD_BITS) | record


def rank_of(location: Locations) -> Locations:
    """The rank that stores the record of a location."""
    return location >> RECORD_BITS


def record_of(location: Locations) -> Locations:
    """The record's number on the rank that stores it."""
    return location & ((1 << RECORD_BITS) - 1)
