"""What is known of the contents of data files: their footers at once, their values as they are read.

A Parquet footer says how large every column of every row group is and what its least and greatest values are;
its digest is known when a file is opened. Digests of values are made row group by row group while training
reads them anyway; a row group that is read again, in a later epoch or after a restart, must have the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rowhaul.data.block import Block
from rowhaul.data.columns import Float32s
from rowhaul.errors import DataError

_TAIL_BYTES = 8  # the footer's size and the magic word, behind it


@dataclass(frozen=True)
class FileFacts:
    """A file as it is when opened; equal files have equal bytes, rows and footers."""

    name: str
    bytes: int
    rows: int
    footer: str  # digest
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, footer: Any) -> FileFacts:
        """Look at a file, given its Parquet metadata."""
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(size - _TAIL_BYTES - footer.serialized_size)
            digest = xxhash.xxh3_64_hexdigest(file.read(footer.serialized_size))
        return cls(path.name, size, footer.num_rows, digest, path.stat().st_mtime_ns)

    def is_like(self, other: FileFacts) -> bool:
        """Whether both may have the same contents."""
        return (self.bytes, self.rows, self.footer) == (other.bytes, other.rows, other.footer)


class ContentDigests:
    """Digests of the values of row groups, by file and number of the group."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], str] = {}

    def check(self, file: int, group: int, blocks: Sequence[str], path: Path) -> None:
        """Compare a row group that was read with what it was before, or remember it."""
        digest = xxhash.xxh3_64_hexdigest("".join(blocks).encode())
        if self.known.setdefault((file, group), digest) != digest:
            raise DataError(
                f"{path} has changed since training read it: row group {group} holds other values; restore "
                "the file, or start a new run"
            )


def digest_of(block: Block, numbers: Iterable[Float32s]) -> str:
    """The digest of decoded values; ``numbers`` are the dense columns as stored.

    Transformed ones would not do: processors round logarithms differently.
    """
    digest = xxhash.xxh3_64()
    ids = [array for one in block.ids for array in (one.values, one.offsets)]
    targets = block.targets
    for array in (*ids, *numbers, targets.labels, block.times, targets.weights, targets.groups):
        digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()


def first_difference(before: Sequence[FileFacts], now: Sequence[FileFacts]) -> str:
    """Say which of the files before has changed, moved or gone; empty if all are there, in order."""
    names = [one.name for one in now]
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        if old.is_like(new):
            continue
        if old.name == new.name:
            return f"{old.name} has changed ({_size(old)}, now {_size(new)})"
        where = "is gone" if old.name not in names else f"is not at its place: file {place + 1} is {new.name}"
        return f"{old.name} {where}"
    gone: Iterable[FileFacts] = before[len(now) :]
    return next((f"{one.name} is gone" for one in gone), "")


def _size(facts: FileFacts) -> str:
    return f"{facts.rows:,} rows in {facts.bytes:,} bytes"
