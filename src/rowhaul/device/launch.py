"""How kernels are started: sizes of blocks, and grids that cover so many of them."""

from __future__ import annotations

from typing import Any

import triton

_MOST_PROGRAMS = 2048  # that find their work themselves: some for each processor of a large card


def grid_of(count: int, block: int) -> tuple[int]:
    """As many programs as cover ``count``; at least one."""
    return (max(triton.cdiv(count, block), 1),)


def limited(grid: tuple[int]) -> tuple[int]:
    """As many programs as run at once, where each goes on until all is done."""
    return (min(grid[0], _MOST_PROGRAMS),)


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
