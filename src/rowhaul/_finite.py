"""Whether numbers are finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def is_finite(values: Tensor | npt.NDArray[Any]) -> bool:
    """Whether all values are finite, in one pass."""
    given = torch.from_numpy(values) if isinstance(values, np.ndarray) else values.detach()
    if not given.numel() or math.isfinite(given.sum()):
        return True
    return all(map(math.isfinite, torch.aminmax(given)))  # the sum of large, finite numbers may overflow
