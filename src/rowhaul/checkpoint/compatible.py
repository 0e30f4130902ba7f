"""Whether checkpoints can be put together; where they cannot, the difference is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import safetensors

from rowhaul.checkpoint.layout import TableEntry
from rowhaul.checkpoint.pruned import is_pruned
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError

_NOTHING = np.empty(0)


def check_compatible(sources: Sequence[CheckpointReader]) -> list[TableEntry]:
    """All tables, in order of first mention; refuses rows of other sizes, types or optimizers."""
    if not sources:
        raise CheckpointError("no checkpoints to merge; name at least one")
    first_with: dict[str, tuple[CheckpointReader, object]] = {}

    def must_agree(reader: CheckpointReader, what: str, value: object) -> None:
        before, expected = first_with.setdefault(what, (reader, value))
        if value != expected:
            raise CheckpointError(
                f"{before.path} and {reader.path} do not go together: {what} is {expected} in the first and "
                f"{value} in the second; merge checkpoints of one configuration"
            )

    tables: dict[str, TableEntry] = {}
    for reader in sources:
        if "row_optimizer" in reader.facts:
            must_agree(reader, "the row optimizer", reader.facts["row_optimizer"])
        for table in reader.tables.values():
            _refuse_pruned(reader, table)
            tables.setdefault(table.name, table)
            must_agree(reader, f"the dim of table {table.name!r}", table.dim)
            must_agree(reader, "the type of the rows", table.dtype)
            must_agree(reader, f"the optimizer state of a row of table {table.name!r}", table.state_width)
    joined_key_kinds(sources)
    return list(tables.values())


def _refuse_pruned(reader: CheckpointReader, table: TableEntry) -> None:
    """Pruned rows are as they are by one pool and one threshold: rows of another run do not fit in."""
    for name in table.files[:1]:
        with safetensors.safe_open(reader.verified(name), framework="numpy") as file:
            if is_pruned(dict.fromkeys(file.keys(), _NOTHING)):
                raise CheckpointError(
                    f"{reader.path}: the rows of table {table.name!r} are pruned, and pruned rows cannot "
                    "be merged; export it, or go on with the run that it is of"
                )


def joined_key_kinds(sources: Sequence[CheckpointReader]) -> dict[str, str]:
    """Which features have integer ids and which text; one feature must not have both."""
    joined: dict[str, str] = {}
    for reader in sources:
        for feature, kind in reader.facts.get("key_kinds", {}).items():
            if joined.setdefault(feature, kind) != kind:
                raise CheckpointError(
                    f"{reader.path}: feature {feature!r} has {kind} ids, but {joined[feature]} ids in a "
                    "checkpoint before it, which are different keys; they cannot be merged"
                )
    return joined
