"""What a checkpoint will consist of, collected while training pauses and written while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.checkpoint import ShardWriter
from rowhaul.store.row_parts import Arrays

_SMALL_BYTES = 1 << 16  # copied anyway

Pace = Callable[[], None]
"""Called between pieces of work: waits where it goes too fast, raises an error where it is to end."""


class DeferredWriter:
    """Collects what a `ShardWriter` is to write; it has the same methods.

    Args:
        copies_rows: whether blocks of rows are copied now, too. Otherwise they are read when they are
            written, and must not change until then: a snapshot's blocks do not.
    """

    def __init__(self, *, copies_rows: bool) -> None:
        self.facts: dict[str, Any] = {}
        self._copies_rows = copies_rows
        self._steps: list[Callable[[ShardWriter, Pace], None]] = []

    def tensors(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy a group of tensors."""
        copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self._steps.append(lambda writer, pace: writer.tensors(group, copies))

    def arrays(self, name: str, arrays: Mapping[str, npt.NDArray[Any]], *, given: bool = False) -> str:
        """Copy the arrays of a file, unless they are given away; returns its name."""
        copies = {
            key: array if given and array.nbytes > _SMALL_BYTES else np.array(array)
            for key, array in arrays.items()
        }
        self._steps.append(lambda writer, pace: _no_result(writer.arrays(name, copies)))
        return f"{name}.safetensors"

    def blocks(
        self,
        name: str,
        blocks: Iterable[Arrays],
        dim: int,
        state_width: int,
        dtype: str,
        format: str = "whole",
    ) -> None:
        """Collect the rows of a table."""
        if self._copies_rows:
            blocks = [{key: np.array(array) for key, array in block.items()} for block in blocks]
        self._steps.append(
            lambda writer, pace: writer.blocks(name, _paced(blocks, pace), dim, state_width, dtype, format)
        )

    def then(self, write: Callable[[ShardWriter, Pace], None]) -> None:
        """Collect what is written by a function."""
        self._steps.append(write)

    def write_to(self, writer: ShardWriter, pace: Pace) -> None:
        """Write everything, and free it on the way."""
        self._steps.reverse()
        while self._steps:
            pace()
            self._steps.pop()(writer, pace)


def _paced(blocks: Iterable[Arrays], pace: Pace) -> Iterator[Arrays]:
    for block in blocks:
        pace()
        yield block


def _no_result(name: str) -> None:
    """Ignore the name of a file, which is known already."""
