"""Products of float32 matrices on the tensor cores of a card, nearly as exact as those in float32.

Tensor cores multiply TF32, which has 11 bits of a number's 24. A number is the sum of two such; three of
their products are that of the numbers but for its last bits. The parts of a matrix lie side by side, so that
three products are one, with sums three times as long. Tensor cores cut sums off where float32 rounds them, so
errors are up to three times those of float32, and some hundred times smaller than those of TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
from torch import Tensor

from rowhaul.device.layer_kernels import split

_FAST = ((8, 0), (9, 0), (10, 0), (10, 3))  # cards that multiply TF32 more than thrice as fast as float32
_WORTH_PARTS = 1 << 29  # multiplications of a product
_WORD = 4  # numbers that rows are made of: libraries multiply others slowly
_ROWS, _COLUMNS = 8, 128


def are_worth_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether x · weightᵀ, in float32, is quicker in three products of TF32."""
    (samples, inputs), outputs = x.shape, len(weight)
    if samples * inputs * outputs < _WORTH_PARTS or inputs % _WORD or outputs % _WORD:
        return False
    return not allows_tf32() and _capability(x.device) in _FAST


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def allows_tf32() -> bool:
    """Whether PyTorch may multiply matrices of float32 as TF32; it has two names for that."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


@contextmanager
def in_tf32() -> Iterator[None]:
    """Allow TF32 in PyTorch's matrix products. The setting is global, so keep the block short."""
    matmul = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def parts_of(matrix: Tensor, *, high_first: bool, width: int = 0, above: bool = False) -> Tensor:
    """Return the three parts of a matrix, side by side in each row: high, low, high; or low, high, high.

    Args:
        matrix: in float32.
        high_first: which of the two; the other factor of a product has the other.
        width: columns of a part, if there are to be more; the rest are zeros.
        above: whether parts are one above the other.
    """
    matrix, (num_rows, columns) = matrix.contiguous(), matrix.shape
    width = max(width, columns)
    out = matrix.new_empty((3 * num_rows, width) if above else (num_rows, 3 * width))
    row_stride, part_stride = (width, num_rows * width) if above else (3 * width, width)
    split[triton.cdiv(num_rows, _ROWS), triton.cdiv(width, _COLUMNS)](
        matrix, out, num_rows, columns, width, row_stride, part_stride,
        HIGH_FIRST=high_first, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out
