"""Pruned tables as a collection drives them, without one: for tests that look at what is in them."""

import numpy as np

from rowhaul.pruning.pool.tables import PrunedTables
from rowhaul.store import TableSpec
from rowhaul.store.distinct import distinct_keys


class Fast:
    """Pruned tables, read in one or two parts, as the groups of a collection do."""

    def __init__(self, prune, dim, optimizer, dtype=np.float64, num_tables=3, split=None, seed=5, least=4):
        self.specs = [TableSpec(f"t{t}", dim, -1, 1) for t in range(num_tables)]
        self.num_tables, self.cuts = num_tables, [0, split or num_tables, num_tables]
        self.tables = PrunedTables(self.specs, optimizer, dtype, seed, prune, least_entries=least)
        self.lookups = []

    @property
    def map(self):
        return self.tables.map

    def locate(self, batch):
        """The entries of a batch, by part."""
        located = []
        for first, end in zip(self.cuts, self.cuts[1:], strict=False):
            if end == first:
                continue
            keys = [[key for t, key in batch if t == table] for table in range(first, end)]
            starts = np.cumsum([0, *map(len, keys)])
            values = np.array([key for some in keys for key in some], dtype=np.int64)
            distinct = distinct_keys(values, starts, np.arange(first, end), self.num_tables)
            located.append(self.map.locate(*distinct))
        return located

    def read(self, batch, located=None):
        """The rows of a batch by name; it may have been located some time ago."""
        if located is None:
            located = self.locate(batch)
        for one in located:
            self.map.refresh(one)
        self.tables.add_new(located)
        self.lookups = [self.tables.read(one, counting=True) for one in located]
        rows = {name: np.zeros(self.specs[0].dim, self.tables.dtype) for name in batch}  # also untracked ones
        for lookup in self.lookups:
            whole, places = self.tables.assembled(lookup.slots, lookup.held, lookup.starts)
            for name, row in zip(self.names(lookup), whole[places[1:]], strict=True):
                rows[name] = row
        return rows

    def names(self, lookup):
        return list(zip(lookup.tables.tolist(), lookup.keys.tolist(), strict=True))

    def step(self, gradients, lr, number):
        if self.tables.awaits_columns:
            for (table, _), gradient in gradients.items():
                self.tables.squares[table] += gradient.astype(np.float64) ** 2
        for lookup in self.lookups:
            names = self.names(lookup)
            of_rows = np.array([gradients[name] for name in names]).reshape(len(names), self.tables.dim)
            self.tables.step(lookup, of_rows.astype(self.tables.dtype), lr, number)
        return self.tables.finish_step(number)

    def rows(self):
        """{(table, key): (whole row, which chunks are there, utilities, touched, records)}"""
        found = {}
        for table in range(self.num_tables):
            for keys, rows in self.tables.blocks(table):
                for key, row in zip(keys.tolist(), rows, strict=True):
                    found[table, key] = [row]
            for block in self.tables.row_blocks(table):
                ends = np.cumsum(block["present"].sum(axis=1))
                parts = np.split(block["chunks"], ends[:-1])
                for i, key in enumerate(block["keys"].tolist()):
                    found[table, key] += [
                        block["present"][i],
                        block["utilities"][i],
                        block["touched"][i],
                        parts[i],
                    ]
        return found
