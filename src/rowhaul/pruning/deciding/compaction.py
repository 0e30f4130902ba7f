"""An index without the room that forgotten rows left: shards never shrink by themselves.

Rows of one table go and those of another come, so that every table would keep the room of its best days, and
all of them together more than a budget allows.
"""

from __future__ import annotations

import numpy as np

from rowhaul.store.index import KeyIndex


def compacted(index: KeyIndex) -> KeyIndex:
    """The same keys and locations in as much room as they need; for a while, both are there."""
    other = KeyIndex(index.num_tables)
    tables = np.arange(index.num_tables + 1)
    for table in range(index.num_tables):
        for keys, locations in index.blocks(table):
            other.add(keys, np.where(tables > table, len(keys), 0), np.arange(len(keys)), locations)
    return other
