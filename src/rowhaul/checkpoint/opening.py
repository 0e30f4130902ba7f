"""From what a person names, a checkpoint, a run or a folder of checkpoints, to the checkpoint meant."""

from __future__ import annotations

from pathlib import Path

from rowhaul.checkpoint.layout import MANIFEST_FILE, finished_checkpoints, latest_checkpoint
from rowhaul.checkpoint.reader import CheckpointReader
from rowhaul.errors import CheckpointError

_CHECKPOINTS = "checkpoints"  # the folder of a run that holds them


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """A checkpoint, or the newest complete one of a run or of a folder of checkpoints."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; name a checkpoint or the --out of a `train`")
    if (path / MANIFEST_FILE).is_file():
        return CheckpointReader(path)
    newest = latest_checkpoint(path / _CHECKPOINTS) or latest_checkpoint(path)
    if newest is None:
        raise CheckpointError(
            f"{path} is no checkpoint, and holds no complete one: neither {MANIFEST_FILE} nor "
            f"{_CHECKPOINTS}/step-…/{MANIFEST_FILE} is there; name a checkpoint or the --out of a `train`"
        )
    return CheckpointReader(newest)


def beside(reader: CheckpointReader) -> list[Path]:
    """The complete checkpoints of the same folder, oldest first, this one among them."""
    return finished_checkpoints(reader.path.parent)


def run_of(reader: CheckpointReader) -> Path | None:
    """The run folder that a checkpoint lies in, if it does."""
    folder = reader.path.resolve().parent
    return folder.parent if folder.name == _CHECKPOINTS else None
