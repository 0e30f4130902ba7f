"""Checks whether two different strings of one table got the same key.

The input is read again and each string hashed twice, by the key's hash and by an independent one. Two
strings that share a key then almost surely differ in the second hash (they would agree in both with a
probability of 2^-64), so a key with two second hashes is a collision. The pairs go to scratch files by the
top bits of the key, and one such partition after the other is examined: memory is bounded, the scratch
space is 16 bytes per distinct string and chunk.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.folder.files import writing
from rowhaul.data.formats.source import Source
from rowhaul.data.text.reader import BadLines

Pairs = npt.NDArray[np.uint64]  # n x 2: key, second hash

_SECOND_SEED = 1
_PARTITION_BITS = 6
_PAIRS_IN_MEMORY = 1 << 21  # 32 MiB


def find_collisions(source: Source, scratch: Path) -> dict[str, int]:
    """Count the strings of each table that share their key with an earlier one; only tables of strings."""
    table_of = {column.name: column.table for column in source.schema.ids}
    spills = {
        table_of[name]: _Spill(scratch / str(number)) for number, name in enumerate(source.string_features)
    }
    shutil.rmtree(scratch, ignore_errors=True)
    first = source.chunks(None, BadLines(skip=True))
    second = source.chunks(None, BadLines(skip=True), _SECOND_SEED)
    with writing(scratch.parent):
        for chunk, again in zip(first, second, strict=True):
            for name in source.string_features:
                keys, hashes = _flat(chunk.batch[name]), _flat(again.batch[name])
                spills[table_of[name]].add(np.stack([keys, hashes], axis=1).view(np.uint64))
        return {table: spill.count_collisions() for table, spill in spills.items()}


def _flat(column: pa.Array) -> npt.NDArray[np.int64]:
    values = column.flatten() if pa.types.is_list(column.type) else column
    return np.asarray(values.drop_null().to_numpy(zero_copy_only=False))


class _Spill:
    """Distinct pairs, in memory up to a limit, then in files by the bits of the key from ``shift`` on."""

    def __init__(self, folder: Path, shift: int = 64 - _PARTITION_BITS) -> None:
        self._folder, self._shift = folder, shift
        self._waiting: list[Pairs] = []
        self._num_waiting = 0

    def add(self, pairs: Pairs) -> None:
        pairs = _distinct(pairs)
        self._waiting.append(pairs)
        self._num_waiting += len(pairs)
        if self._num_waiting > _PAIRS_IN_MEMORY:
            self._spill()

    def count_collisions(self) -> int:
        """Examine all pairs and remove the files."""
        if not self._folder.exists():
            return _count(self._waiting)
        self._spill()
        collisions = 0
        for path in sorted(self._folder.iterdir()):
            pairs = np.memmap(path, np.uint64, mode="r").reshape(-1, 2)
            if len(pairs) <= _PAIRS_IN_MEMORY or self._shift < _PARTITION_BITS:
                collisions += _count([pairs])
            else:
                finer = _Spill(path.with_suffix(".finer"), self._shift - _PARTITION_BITS)
                for start in range(0, len(pairs), _PAIRS_IN_MEMORY // 4):
                    finer.add(pairs[start : start + _PAIRS_IN_MEMORY // 4])
                collisions += finer.count_collisions()
        shutil.rmtree(self._folder)
        return collisions

    def _spill(self) -> None:
        if not self._waiting:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        pairs = _distinct(np.concatenate(self._waiting))
        partition = (pairs[:, 0] >> np.uint64(self._shift)) & np.uint64((1 << _PARTITION_BITS) - 1)
        order = np.argsort(partition, kind="stable")
        bounds = np.searchsorted(partition[order], np.arange((1 << _PARTITION_BITS) + 1))
        for number in np.unique(partition):
            with (self._folder / f"{number:02d}").open("ab") as file:
                file.write(pairs[order[bounds[number] : bounds[number + 1]]].tobytes())
        self._waiting, self._num_waiting = [], 0


def _distinct(pairs: Pairs) -> Pairs:
    """The pairs sorted, each once."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    fresh = np.ones(len(pairs), np.bool_)
    fresh[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[fresh]


def _count(parts: list[Pairs]) -> int:
    if not parts:
        return 0
    keys = _distinct(np.concatenate(parts))[:, 0]
    return int((keys[1:] == keys[:-1]).sum())
