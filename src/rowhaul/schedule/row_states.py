"""The states of a row between two iterations."""

from enum import IntEnum

import numpy as np


class State(IntEnum):
    """Where the latest version of a row is.

    Masks of workers refine it: `latest` are clean copies of a HOME row and the owner of an OWNED one;
    `partial` (U), `settled` (P) and `base` describe a SPLIT row.
    """

    FRESH = 0  # nowhere: never trained; any rank makes it without a transfer
    HOME = 1  # at its home store; some workers may hold clean copies
    OWNED = 2  # on one worker alone, which trained it last
    SPLIT = 3  # nowhere: several workers trained it in one iteration and hold partial gradients
    REPLICATED = 4  # on every worker (the hot set)
    NOT_ADMITTED = 5  # nowhere: not seen often enough; reads its initial value, its gradient is dropped


# The states as kernels compare them.
FRESH, HOME, OWNED, SPLIT, REPLICATED, NOT_ADMITTED = (np.uint8(state) for state in State)
