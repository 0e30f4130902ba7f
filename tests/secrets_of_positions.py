"""Run something under a given secret of positions in memory; afterwards the process has its own again."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rowhaul._scramble import SECRET_BYTES, draw_secret


@contextmanager
def secret(number: int) -> Iterator[None]:
    """Use secret ``number`` of many; tables made before must not be used inside."""
    before = draw_secret(np.random.default_rng(number).bytes(SECRET_BYTES))
    try:
        yield
    finally:
        draw_secret(before)
