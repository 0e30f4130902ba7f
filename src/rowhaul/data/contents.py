"""What is known of the contents of data files: their footers at once, their values as they are read.

A Parquet footer says how large every column of every row group is and what its least and greatest values are;
its digest is known when a file is opened. Digests of values are made row group by row group while training
reads them anyway; a row group that is read again, in a later epoch or after a restart, must have the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.data.block import Block
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

    def check(self, file: int, group: int, blocks: Sequence[Mapping[str, int]], path: Path) -> None:
        """Compare a row group that was read with what it was before, or remember it.

        Args:
            file: number of the file.
            group: number of the row group.
            blocks: `column_digests` of all columns, block by block.
            path: of the file, for messages.
        """
        digest = xxhash.xxh3_64_hexdigest(json.dumps([sorted(one.items()) for one in blocks]).encode())
        if self.known.setdefault((file, group), digest) != digest:
            raise DataError(
                f"{path} has changed since training read it: row group {group} holds other values; restore "
                "the file, or start a new run"
            )


def column_digests(
    block: Block, features: Sequence[str], dense: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The digest of each column of a block, by name, dense ones as stored.

    Transformed ones would not do: processors round logarithms differently.
    """
    targets = (block.targets.labels, block.times, block.targets.weights, block.targets.groups)
    columns = [(f"id {name}", one.values, one.offsets) for name, one in zip(features, block.ids, strict=True)]
    columns += [(f"dense {name}", one, None) for name, one in zip(dense, block.dense.T, strict=True)]
    digests = [(name, _digest(*arrays)) for name, *arrays in columns]
    if any(one is not None for one in targets):
        digests.append(("targets", _digest(*targets)))
    return tuple(digests)


def _digest(*arrays: npt.NDArray[Any] | None) -> int:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    return digest.intdigest()


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
