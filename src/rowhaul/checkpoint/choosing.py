"""Which checkpoint a run resumes from: the newest that is intact.

Every file is read and compared with its checksum before the choice is made, for loading cannot go back. That
costs one more read of the checkpoint; several ranks share it, each reads its part of the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rowhaul.checkpoint.layout import LAYOUT, SCHEDULE, finished_checkpoints
from rowhaul.checkpoint.location import Place
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.checkpoint.writer import set_aside
from rowhaul.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to resume from, and the newer ones that are damaged, with the reasons."""

    path: Place
    damaged: dict[Place, str]

    @property
    def notes(self) -> list[str]:
        """Say what was chosen, and why not a newer one."""
        notes = [f"{path.name} is damaged and not used: {reason}" for path, reason in self.damaged.items()]
        return [*notes, f"resuming from {self.path}"]

    def set_damaged_aside(self) -> None:
        """Make room for the steps of damaged checkpoints, which will be trained again."""
        for path in self.damaged:
            set_aside(path)


def choose(folder: Place) -> Chosen | None:
    """Return the newest intact checkpoint of a folder or URL; None where there is no checkpoint.

    Raises:
        CheckpointError: all are damaged.
    """
    return newest_intact(finished_checkpoints(folder), damage)


def newest_intact(paths: list[Place], damage_of: Callable[[Place], str]) -> Chosen | None:
    """Return the last of some checkpoints, oldest first, that has no damage."""
    damaged: dict[Place, str] = {}
    for path in reversed(paths):
        reason = damage_of(path)
        if not reason:
            return Chosen(path, damaged)
        damaged[path] = reason
    if damaged:
        reasons = "\n".join(f"  {path.name}: {reason}" for path, reason in damaged.items())
        raise CheckpointError(
            f"every checkpoint in {paths[0].parent} is damaged:\n{reasons}\nRestore one of them from a copy, "
            "or start a new run"
        )
    return None


def damage(path: Place, rank: int = 0, num_ranks: int = 1, is_cluster: bool = False) -> str:
    """Say how a checkpoint is damaged, after a look at the sizes of all files and the bytes of a rank's part.

    What only the cluster that saved can use does not count if this is another one. Storage that cannot be
    read is no damage, and raises an error.
    """
    try:
        reader = CheckpointReader(path)
        saved_by = len(reader.facts.get("cluster", {}).get("threads", ()))
        skipped = () if is_cluster and saved_by == num_ranks else (LAYOUT, SCHEDULE)
        names = [name for name in sorted(reader.file_bytes) if not name.startswith(skipped)]
        reader.check_sizes(names)
        for name in names[rank::num_ranks]:
            reader.check(name)
    except DamagedCheckpointError as error:
        return str(error).rpartition(";")[0]
    return ""
