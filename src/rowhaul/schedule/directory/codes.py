"""The states of rows as kernels compare them."""

from __future__ import annotations

import numpy as np

from rowhaul.schedule.directory.states import State

FRESH, HOME = np.uint8(State.FRESH), np.uint8(State.HOME)
OWNED, SPLIT = np.uint8(State.OWNED), np.uint8(State.SPLIT)
REPLICATED, NOT_ADMITTED = np.uint8(State.REPLICATED), np.uint8(State.NOT_ADMITTED)
