"""Which reader decodes which columns, where several processes of a host read the same files together.

Columns, not row groups: a row group may be a whole file, and readers that take turns at row groups would make
training wait for one of them at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rowhaul.data.block import Block
from rowhaul.data.schema import Schema


@dataclass(frozen=True)
class ColumnShare:
    """The columns that one reader decodes: places in the schema, and labels with what goes with them."""

    features: tuple[int, ...]  # among the id features that are stored
    dense: tuple[int, ...]
    targets: bool


@dataclass(frozen=True)
class DecodedColumns:
    """A share of the columns of a run of samples."""

    block: Block
    digests: tuple[tuple[str, int], ...]  # of the columns, by name


def all_columns(schema: Schema) -> ColumnShare:
    """The share of a process that reads alone."""
    return ColumnShare(tuple(range(len(schema.stored_features))), tuple(range(len(schema.dense))), True)


def divide_columns(schema: Schema, costs: Mapping[str, int], num_readers: int) -> list[ColumnShare]:
    """Divide the columns so that all readers have about as much to do.

    The first one also reads the targets, puts the columns of all together, and plans: that takes it about
    half as long as decoding all columns. There are fewer shares than readers where columns are few.

    Args:
        schema: of the files.
        costs: of decoding, by column.
        num_readers: most shares.
    """
    features = [(costs.get(name, 0), "id", place) for place, name in enumerate(schema.stored_features)]
    dense = [(costs.get(one.name, 0), "dense", place) for place, one in enumerate(schema.dense)]
    cheapest = min(features)  # the first one's in any case: it must know how many rows there are
    loads = [sum(costs.values()) // 2, *[0] * (num_readers - 1)]
    shares: list[list[tuple[str, int]]] = [[cheapest[1:]], *([] for _ in range(num_readers - 1))]
    others = [one for one in (*features, *dense) if one is not cheapest]
    for cost, kind, place in sorted(others, key=lambda one: (-one[0], *one[1:])):
        lightest = int(np.argmin(loads))
        loads[lightest] += cost
        shares[lightest].append((kind, place))
    return [
        ColumnShare(
            features=tuple(sorted(place for kind, place in share if kind == "id")),
            dense=tuple(sorted(place for kind, place in share if kind == "dense")),
            targets=number == 0,
        )
        for number, share in enumerate(shares)
        if share
    ]


def join_columns(shares: Sequence[ColumnShare], blocks: Sequence[Block]) -> Block:
    """Put the columns of the same samples together, in the schema's order."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    ids = {
        place: one
        for share, block in zip(shares, blocks, strict=True)
        for place, one in zip(share.features, block.ids, strict=True)
    }
    dense = np.empty((sum(len(share.dense) for share in shares), len(first)), np.float32)
    for share, block in zip(shares, blocks, strict=True):
        dense[list(share.dense)] = block.dense.T
    return Block(tuple(ids[place] for place in sorted(ids)), dense.T, first.targets, first.times)
