"""From what a person names, a checkpoint, a run or a folder of checkpoints, to the checkpoint meant."""

from __future__ import annotations

from pathlib import Path

from rowhaul.checkpoint.layout import MANIFEST_FILE, finished_checkpoints, latest_checkpoint
from rowhaul.checkpoint.location import Place, as_place, local_path, storage_of
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError, DamagedCheckpointError

_CHECKPOINTS = "checkpoints"  # the folder of a run that holds them


def open_checkpoint(path: str | Place) -> CheckpointReader:
    """A checkpoint, or the newest complete one of a run or of a folder or URL of checkpoints.

    If that one is damaged, the error says so, and which others there are; none is taken in its place.
    """
    place = as_place(path)
    if not storage_of(place).exists(place):
        raise CheckpointError(f"{place}: no such file or folder; name a checkpoint or the --out of a `train`")
    if storage_of(place).is_file(place / MANIFEST_FILE):
        return CheckpointReader(place)
    newest = latest_checkpoint(place / _CHECKPOINTS) or latest_checkpoint(place)
    if newest is None:
        raise CheckpointError(
            f"{place} is no checkpoint, and holds no complete one: neither {MANIFEST_FILE} nor "
            f"{_CHECKPOINTS}/step-…/{MANIFEST_FILE} is there; name a checkpoint or the --out of a `train`"
        )
    try:
        return CheckpointReader(newest)
    except DamagedCheckpointError as error:
        others = [one.name for one in finished_checkpoints(newest.parent) if one != newest]
        if not others:
            raise
        there = f"beside it, in {newest.parent}, there is {', '.join(others)}"
        raise DamagedCheckpointError(f"{error}; {there}") from None


def beside(reader: CheckpointReader) -> list[Place]:
    """The complete checkpoints of the same folder, oldest first, this one among them."""
    return finished_checkpoints(reader.path.parent)


def run_of(reader: CheckpointReader) -> Path | None:
    """The run folder that a checkpoint lies in, if it does."""
    path = local_path(reader.path)
    if path is None:
        return None
    folder = path.resolve().parent
    return folder.parent if folder.name == _CHECKPOINTS else None
