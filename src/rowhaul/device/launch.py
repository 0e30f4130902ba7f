"""How kernels are started: sizes of blocks, and grids that cover so many of them."""

from __future__ import annotations

from typing import Any

import triton

BLOCK = 256  # ids a program


def grid_of(count: int, block: int = BLOCK) -> tuple[int]:
    """As many programs as cover ``count``; at least one."""
    return (max(triton.cdiv(count, block), 1),)


def columns_of(width: int) -> int:
    """The power of two that covers a row."""
    found: int = triton.next_power_of_2(max(width, 1))
    return found


def rows_together(width: int, elements: int = 1024) -> int:
    """Rows that one program works on: about so many elements, a power of two."""
    return max(1, elements // columns_of(width))


def runs_interpreted() -> bool:
    """Whether Triton interprets kernels, on CPU tensors; decided when it is imported."""
    knobs: Any = triton.knobs.runtime
    return bool(knobs.interpret)
