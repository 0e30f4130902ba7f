"""Whether checkpoints can be put together; where they cannot, the difference is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import safetensors

from rowhaul.checkpoint.layout import TableEntry
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError
from rowhaul.pruning.row_files import FACT


def check_compatible(sources: Sequence[CheckpointReader]) -> list[TableEntry]:
    """All tables, in order of first mention; refuses rows of other sizes, types or optimizers."""
    if not sources:
        raise CheckpointError("no checkpoints to merge; name at least one")
    _check_pruned(sources)
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
            tables.setdefault(table.name, table)
            must_agree(reader, f"the dim of table {table.name!r}", table.dim)
            must_agree(reader, "the type of the rows", table.dtype)
            must_agree(reader, f"the optimizer state of a row of table {table.name!r}", table.state_width)
    joined_key_kinds(sources)
    return list(tables.values())


def _check_pruned(sources: Sequence[CheckpointReader]) -> None:
    """Refuse pruned rows beside whole ones, or in chunks of another size, with the reason."""
    first, how = sources[0], sources[0].facts.get(FACT)
    for reader in sources[1:]:
        other = reader.facts.get(FACT)
        if (other is None) != (how is None):
            pruned, whole = (first, reader) if how is not None else (reader, first)
            raise CheckpointError(
                f"{pruned.path} was pruned and {whole.path} was not: rows of the one are in chunks, those of "
                "the other whole; merge checkpoints of one configuration"
            )
        if how is not None and other is not None and how["chunks"] != other["chunks"]:
            raise CheckpointError(
                f"{first.path} was pruned with {how['chunks']} chunks a row and {reader.path} with "
                f"{other['chunks']}: chunks of one size cannot become those of another; merge checkpoints "
                "with the same prune.chunks"
            )
        if how is not None and set(first.tables) != set(reader.tables):
            others = ", ".join(sorted(set(first.tables) ^ set(reader.tables)))
            raise CheckpointError(
                f"{first.path} and {reader.path} have not the same tables, only one has {others}: tables "
                "that are pruned together share their memory; merge checkpoints of one configuration"
            )


def stored_columns(sources: Sequence[CheckpointReader], table: str) -> dict[str, npt.NDArray[np.int64]]:
    """Which columns of a pruned table's rows are stored, and how they are cut; none where there are no rows.

    Raises:
        CheckpointError: not all have the same.
    """
    known: dict[str, npt.NDArray[np.int64]] = {}
    for reader in sources:
        for name in reader.tables[table].files:
            with safetensors.safe_open(reader.verified(name), framework="numpy") as file:
                found = {part: file.get_tensor(part) for part in ("columns", "starts")}
            if known and not np.array_equal(known["columns"], found["columns"]):
                before, now = len(known["columns"]), len(found["columns"])
                how = f"{before} and {now}" if before != now else f"other {now}"
                raise CheckpointError(
                    f"{reader.path}: of the rows of table {table!r} it keeps other columns than those before "
                    f"it ({how}): prune.dims chose them in each run by itself; merge checkpoints of one run"
                )
            known = found
    return known


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
