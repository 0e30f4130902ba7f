"""Pruned tables as a collection drives them, without one: for tests that look at what is in them."""

import numpy as np

from rowhaul.pruning.pool import ChunkPool, PrunedTables, Pruner
from rowhaul.store import TableSpec


class Fast:
    """Pruned tables in one or two groups, driven as a collection drives them."""

    def __init__(self, prune, dim, optimizer, dtype=np.float64, num_tables=3, split=None, seed=5, least=4):
        self.specs = [TableSpec(f"t{t}", dim, -1, 1) for t in range(num_tables)]
        self.num_tables, self.cuts = num_tables, [0, split or num_tables, num_tables]
        self.pool = ChunkPool(dim, prune.chunks, optimizer, dtype)
        self.groups = [
            PrunedTables(self.specs[a:b], optimizer, dtype, seed, self.pool)
            for a, b in zip(self.cuts, self.cuts[1:], strict=False)
            if b > a
        ]
        self.pruner = Pruner(self.pool, self.groups, prune, prune.budget, seed, least)
        self.lookups = []

    def locate(self, batch):
        """The entries of a batch, by group."""
        located = []
        for first, group in zip(self.cuts, self.groups, strict=False):
            keys = [[key for t, key in batch if t == first + table] for table in range(len(group.tables))]
            starts = np.cumsum([0, *map(len, keys)])
            values = np.array([key for some in keys for key in some], dtype=np.int64)
            located.append(group.locate(values, starts, np.arange(len(group.tables))))
        return located

    def read(self, batch, located=None):
        """The rows of a batch by name; it may have been located some time ago."""
        if located is None:
            located = self.locate(batch)
        for group, one in zip(self.groups, located, strict=True):
            group.refresh(one)
        self.pruner.add_new(located)
        self.lookups = [group.read(one) for group, one in zip(self.groups, located, strict=True)]
        dtype = self.groups[0].dtype
        rows = {name: np.zeros(self.specs[0].dim, dtype) for name in batch}  # also of those without an entry
        for first, group, lookup in zip(self.cuts, self.groups, self.lookups, strict=False):
            for name, row in zip(self.names(first, lookup), group.rows(lookup), strict=True):
                rows[name] = row
        return rows

    def names(self, first, lookup):
        tables = np.repeat(np.arange(len(lookup.starts) - 1), np.diff(lookup.starts)) + first
        return list(zip(tables.tolist(), lookup.keys.tolist(), strict=True))

    def step(self, gradients, lr, number):
        for first, group, lookup in zip(self.cuts, self.groups, self.lookups, strict=False):
            names = self.names(first, lookup)
            of_rows = np.array([gradients[name] for name in names]).reshape(len(names), group.dim)
            of_rows = of_rows.astype(group.dtype)
            group.step(lookup, of_rows, lr, number)
            self.pruner.learn(group, lookup, None, of_rows, number)
        return self.pruner.finish_step(number)

    def rows(self):
        """{(table, key): (whole row, which chunks are there, utilities, touched, records)}"""
        found = {}
        for first, group in zip(self.cuts, self.groups, strict=False):
            for table in range(len(group.tables)):
                for keys, rows in group.blocks(table):
                    for key, row in zip(keys.tolist(), rows, strict=True):
                        found[first + table, key] = [row]
                for block in group.row_blocks(table):
                    ends = np.cumsum(block.present.sum(axis=1))
                    parts = np.split(block.records, ends[:-1])
                    for i, key in enumerate(block.keys.tolist()):
                        found[first + table, key] += [
                            block.present[i],
                            block.utilities[i],
                            block.touched[i],
                            parts[i],
                        ]
        return found
