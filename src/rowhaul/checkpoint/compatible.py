"""Whether checkpoints can be merged; where they cannot, the difference is named."""

from __future__ import annotations

from collections.abc import Sequence

from rowhaul._id_kinds import join_kinds, kinds_in
from rowhaul.checkpoint.layout import TableEntry
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import row_format


def check_compatible(sources: Sequence[CheckpointReader]) -> list[TableEntry]:
    """Return all tables, in order of first mention; refuse rows of other formats, sizes or optimizers."""
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

    for reader in sources:
        for table in reader.tables.values():
            must_agree(reader, "the format of the rows", table.format)
    for format in {table.format for reader in sources for table in reader.tables.values()}:
        row_format(format).check_mergeable(sources)
    tables: dict[str, TableEntry] = {}
    for reader in sources:
        if "row_optimizer" in reader.facts:
            must_agree(reader, "the row optimizer", reader.facts["row_optimizer"])
        for table in reader.tables.values():
            tables.setdefault(table.name, table)
            must_agree(reader, f"the dim of table {table.name!r}", table.dim)
            must_agree(reader, "the type of the rows", table.dtype)
            must_agree(reader, f"the optimizer state of a row of table {table.name!r}", table.state_width)
    joined_key_kinds(sources)
    return list(tables.values())


def joined_key_kinds(sources: Sequence[CheckpointReader]) -> dict[str, str]:
    """Return what the ids of each feature are; one feature must not have two kinds."""
    joined: dict[str, str] = {}
    for reader in sources:
        for feature, kind in kinds_in(reader.facts).items():
            both = join_kinds(joined.setdefault(feature, kind), kind)
            if both is None:
                raise CheckpointError(
                    f"{reader.path}: feature {feature!r} has {kind} ids, but {joined[feature]} ids in a "
                    "checkpoint before it, which are different keys; they cannot be merged"
                )
            joined[feature] = both
    return joined
