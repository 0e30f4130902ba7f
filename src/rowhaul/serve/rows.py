"""`MappedRows`: pooled vectors straight from a mapped file of rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError, UnknownKeyError
from rowhaul.serve.lookup_kernels import locate_rows, pool_packed, pool_whole
from rowhaul.serve.overlay import Overlay
from rowhaul.serve.overlay_kernels import locate_changed
from rowhaul.serve.row_file import FIELD, UNKNOWN, RowFile, unknown_mode
from rowhaul.store.packing import RowPacking

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class ServedFeature(NamedTuple):
    """An id feature: the table that it reads, and where its vector begins."""

    name: str
    table: str
    column: int


@dataclass(frozen=True)
class IdBags:
    """The ids of some samples, feature by feature.

    Bag ``b`` holds ``ids[offsets[b]:offsets[b + 1]]``; the bags of feature ``f`` begin at ``first_bags[f]``.
    A feature has a bag for each sample or, where all samples share it, one.
    """

    ids: Int64s
    offsets: Int64s
    first_bags: Int64s
    num_samples: int


class PooledApart(NamedTuple):
    """Pooled vectors of some samples, features in the order of their columns."""

    own: Floats  # samples x columns of the features that samples have for themselves
    shared: Floats  # columns of the others
    is_shared: tuple[bool, ...]  # which features those are
    num_unknown: Int64s  # ids without a row, by feature


class MappedRows:
    """The rows of some features in a mapped file; any number of threads may read.

    Args:
        file: the file.
        features: in the order that ids come in.
        width: columns of all vectors together.
        on_unknown: what ids without a row read (``default``, ``init``, ``error`` or ``tail``) instead of what
            the file says; pruned rows read as zeros whatever is asked for, and shared rows are always there.
    """

    def __init__(
        self, file: RowFile, features: Sequence[ServedFeature], width: int, on_unknown: str | None = None
    ) -> None:
        mode = None if on_unknown is None else unknown_mode(on_unknown)
        for one in features:
            if one.table not in file.tables:
                known = ", ".join(file.tables)
                raise CheckpointError(
                    f"{file.path} has no table {one.table!r}, which feature {one.name!r} reads; its tables "
                    f"are {known}: export again"
                )
        self.file, self.features, self.width = file, tuple(features), width
        types = {file.value_type(one.table) for one in features}
        if len(types) > 1:
            raise CheckpointError(f"{file.path} has values of {' and '.join(sorted(types))}; export again")
        (self.value_type,) = types
        self.dtype = np.dtype("float64" if self.value_type == "float64" else "float32")
        self._tables = np.array([file.tables[one.table] for one in features], np.int64)
        self._columns = np.array([one.column for one in features], np.int64)
        self._in_order = np.argsort(self._columns).tolist()
        self._dims = file.entries[self._tables, FIELD["dim"]].tolist()
        entries = file.entries
        self._ranges = np.ascontiguousarray(entries[:, [FIELD["initial_low"], FIELD["initial_step"]]]).view(
            np.float64
        )
        self._unknown = entries[:, FIELD["unknown"]].copy()
        if mode is not None:
            self._unknown[entries[:, FIELD["num_chunks"]] == 0] = mode
        self.overlay = Overlay(file)

    def with_changes(self, files: Sequence[RowFile]) -> MappedRows:
        """Return the same rows after a published change; these here stay as they are."""
        made = copy.copy(self)
        made.overlay = self.overlay.with_changes(files)
        return made

    def pool(self, bags: IdBags) -> tuple[Floats, Int64s]:
        """Return pooled vectors, samples x width, and how many ids of each feature have no row."""
        out = np.empty((bags.num_samples, self.width), self.dtype)
        targets = out.ctypes.data + self._columns * self.dtype.itemsize
        return out, self._pool(bags, targets, out, bags.num_samples)

    def pool_apart(self, bags: IdBags, first: int = 0, first_shared: int = 0) -> PooledApart:
        """Return pooled vectors; those that all samples share once.

        Args:
            bags: the ids.
            first: columns to leave free before a sample's own vectors.
            first_shared: columns to leave free before the shared ones. A single sample shares none.
        """
        is_shared = (np.diff(bags.first_bags) == 1) & (bags.num_samples != 1)
        width, width_shared = first, first_shared
        places = np.empty(len(self.features), np.int64)
        for feature in self._in_order:
            dim = self._dims[feature]
            if is_shared[feature]:
                places[feature], width_shared = width_shared, width_shared + dim
            else:
                places[feature], width = width, width + dim
        own = np.empty((bags.num_samples, width), self.dtype)
        shared = np.empty(width_shared, self.dtype)
        starts = np.where(is_shared, shared.ctypes.data, own.ctypes.data)
        num_unknown = self._pool(bags, starts + places * self.dtype.itemsize, own, 1)
        return PooledApart(own, shared, tuple(is_shared[self._in_order].tolist()), num_unknown)

    def _pool(self, bags: IdBags, targets: Int64s, out: Floats, num_copies: int) -> Int64s:
        found, num_unknown = np.empty(len(bags.ids), np.int64), np.empty(len(self.features), np.int64)
        starts = bags.offsets[bags.first_bags]
        base, entries = self.file.address, self.file.entries
        locate_rows(base, entries, self._tables, starts, bags.ids, found, num_unknown)
        changed = self.overlay
        locate_changed(changed.entries, changed.seed, self._tables, starts, bags.ids, found, num_unknown)
        if num_unknown.any():
            self._refuse(bags.ids, starts, found, num_unknown)
        if bags.num_samples:
            where = base, entries, self._tables, targets, bags.first_bags, self._ranges, self._unknown
            given = bags.ids, bags.offsets, found, out, num_copies
            if self.value_type in ("float32", "float64"):
                pool_whole(*where, *given)
            else:
                pool_packed(*where, *given, RowPacking(self.value_type, 2, 0).like)
        return num_unknown

    def _refuse(self, ids: Int64s, starts: Int64s, found: Int64s, num_unknown: Int64s) -> None:
        """Raise an error where an id without a row is one."""
        for feature, (one, table) in enumerate(zip(self.features, self._tables.tolist(), strict=True)):
            if num_unknown[feature] and self._unknown[table] == UNKNOWN.index("error"):
                some = slice(int(starts[feature]), int(starts[feature + 1]))
                key = int(ids[some][found[some] == 0][0])
                raise UnknownKeyError(
                    f"feature {one.name!r}: key {key} of table {one.table!r} was never trained "
                    f"({int(num_unknown[feature])} such ids in this request); train on it, or serve with "
                    "on_unknown init, default or tail"
                )
