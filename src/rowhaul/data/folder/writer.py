"""Writes and resumes prepared data folders, marks them complete, and refuses unfinished ones.

::

    data/schema.yaml           what the columns mean
    data/part-00000.parquet    rows in order, `ROWS_PER_PART` a file
    data/test/part-*.parquet   the last rows, held out
    data/manifest.json         written last: files, rows, what made them
    data/_progress.json        only while unfinished: what is done, where the source continues
    data/_scratch/             only while unfinished: temporary files of the source

`prepare` and `generate` pass chunks to a `FolderWriter`; it cuts them into parts at fixed rows, independent
of the chunks' sizes, so an interrupted and resumed folder equals an uninterrupted one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rowhaul import __version__
from rowhaul.data.folder.files import (
    ROWS_PER_PART,
    TEST_FOLDER,
    Part,
    PartWriter,
    part_name,
    remove_leftovers,
    split_off_test,
    write_json,
    writing,
)
from rowhaul.data.origins import with_note
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import ConfigError, DataError

MANIFEST_FILE = "manifest.json"
PROGRESS_FILE = "_progress.json"
SCRATCH_FOLDER = "_scratch"

Progress = Callable[[int, float], None]
"""Called with the rows done and the share of the whole input, 0 to 1."""


@dataclass(frozen=True)
class Chunk:
    """Some rows, where their source continues after them, and the share of the input used up.

    ``position`` is plain data (it goes to JSON) and means something only to the source.
    """

    batch: pa.RecordBatch
    position: dict[str, Any]
    share: float


def check_complete(path: str | Path) -> None:
    """Refuse a file or folder that belongs to a data folder still being written.

    Folders that Rowhaul did not write pass.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        folder = folder.parent
    for candidate in (folder, folder.parent) if folder.name == TEST_FOLDER else (folder,):
        if (candidate / PROGRESS_FILE).exists():
            raise DataError(
                f"{candidate} is unfinished: the command that writes it was interrupted or is still running; "
                "run the same command again to resume, or delete the folder"
            )


class FolderWriter:
    """Writes a data folder from chunks, or resumes an interrupted one.

    Args:
        folder: where to write; created if necessary.
        schema: of the rows as written.
        made_by: the command that makes the rows, plain data. Only the same command may resume.
        inputs: the input files, plain data with a ``path`` each; if they change, it cannot resume.
        test_share: share of the rows, the last ones, to put into ``test/``.
        overwrite: replace a folder that exists, once there is a first row to write. One that the same command
            has left unfinished is resumed all the same.

    Example::

        with FolderWriter("data", schema, {"command": "generate", "seed": 1}) as writer:
            writer.write(chunks_from(writer.position))  # None: from the start
            manifest = writer.finish({"bayes_auc": 0.8})
    """

    def __init__(
        self,
        folder: str | Path,
        schema: Schema,
        made_by: dict[str, Any],
        *,
        inputs: Sequence[dict[str, Any]] = (),
        test_share: float = 0.1,
        overwrite: bool = False,
    ) -> None:
        if not 0 <= test_share < 1:
            raise ConfigError(f"test_share is {test_share}; a share of at least 0 and below 1 is needed")
        self.folder = Path(folder).expanduser()
        self._schema = schema
        self._overwrite = overwrite
        self._test_share = test_share
        self._made = {"made_by": made_by, "inputs": list(inputs), "test_share": test_share}
        self._parts: list[Part] = []
        self._skip = 0  # rows after `position` that the parts already hold
        self._all_written = False
        self._begun = False  # whether what the folder held before is gone
        self._lock: int | None = None
        self._made_folder = False
        self.position: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        """Rows in finished parts."""
        return sum(part.rows for part in self._parts)

    def __enter__(self) -> FolderWriter:
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"{self.folder} is a file; choose a folder")
        with writing(self.folder):
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._take_lock()
            with writing(self.folder):
                self._check_folder()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        shutil.rmtree(self.folder / SCRATCH_FOLDER, ignore_errors=True)
        if error is not None and not self._parts:
            self._forget()
        self._release()

    def write(self, chunks: Iterable[Chunk], progress: Progress | None = None) -> None:
        """Write the chunks that follow `position`, to the last."""
        if self._all_written:
            return
        part: PartWriter | None = None
        position, rows_seen = self.position, self.rows - self._skip
        try:
            for chunk in chunks:
                batch = chunk.batch.slice(min(max(self.rows - rows_seen, 0), chunk.batch.num_rows))
                while batch.num_rows:
                    with writing(self.folder):
                        if not self._begun:
                            self._begin()
                        part = part or self._begin_part(batch.schema)
                        piece = batch.slice(0, ROWS_PER_PART - part.rows)
                        batch = batch.slice(piece.num_rows)
                        part.write(piece)
                        if part.rows == ROWS_PER_PART:
                            self._parts.append(part.finish())
                            part = None
                            if batch.num_rows:
                                self._save(position, skip=self.rows - rows_seen)
                            else:
                                self._save(chunk.position, skip=0)
                position, rows_seen = chunk.position, rows_seen + chunk.batch.num_rows
                if progress:
                    progress(rows_seen, chunk.share)
            with writing(self.folder):
                if part:
                    self._parts.append(part.finish())
                    part = None
                self._all_written = True
                if self._begun:
                    self._save(position, skip=0)
        finally:
            if part:
                part.discard()

    def _begin_part(self, found: pa.Schema) -> PartWriter:
        return PartWriter(self.folder, part_name(len(self._parts)), with_note(found, self._schema))

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Hold out the test rows and mark the folder complete; returns the manifest.

        ``facts`` go into the manifest as they are.
        """
        if self.rows == 0:
            raise DataError("no rows to write: the input is empty, or every line is bad")
        train_rows = self.rows - int(self.rows * self._test_share)
        with writing(self.folder):
            train, test = split_off_test(self.folder, self._parts, train_rows)
            self._schema.write(self.folder / SCHEMA_FILE)
            manifest = {
                **self._made,
                "rowhaul": __version__,
                "rows": self.rows,
                "train_rows": train_rows,
                "bytes": sum(part.bytes for part in (*train, *test)),
                "files": [asdict(part) for part in (*train, *test)],
                **facts,
            }
            write_json(self.folder / MANIFEST_FILE, manifest)
            (self.folder / PROGRESS_FILE).unlink()
        return manifest

    def _check_folder(self) -> None:
        """Refuse a folder that holds something else, or go on with what was begun."""
        progress, manifest = self.folder / PROGRESS_FILE, self.folder / MANIFEST_FILE
        if progress.exists():
            state = json.loads(progress.read_text(encoding="utf-8"))
            if state["parts"]:
                refused = self._why_not_resumed(state)
                if not refused:
                    return self._resume(state)
                if not self._overwrite:
                    raise DataError(refused)
        elif manifest.exists() and not self._overwrite:
            raise DataError(
                f"{self.folder} already holds a finished data set; choose another folder, or replace it "
                "(--overwrite)"
            )
        elif not manifest.exists():
            for other in self.folder.iterdir():
                if self._overwrite and other.name == SCHEMA_FILE:
                    continue  # left where an earlier attempt to replace the data failed
                raise DataError(
                    f"{self.folder} holds other files ({other.name}); choose an empty or new folder"
                )
        if not manifest.exists():
            self._begin()

    def _begin(self) -> None:
        self._save(None, skip=0)
        (self.folder / MANIFEST_FILE).unlink(missing_ok=True)
        remove_leftovers(self.folder, keep=[])
        self._begun = True

    def _why_not_resumed(self, state: dict[str, Any]) -> str:
        """Say why this command cannot go on with what it finds; empty if it can."""
        made = json.loads(json.dumps(self._made))
        old, new = ({**one["made_by"], "test_share": one["test_share"]} for one in (state, made))
        for what in {**new, **old}:  # an option that is not given has no key
            before, now = old.get(what), new.get(what)
            if before != now:
                return (
                    f"{self.folder} is unfinished and was begun by another command ({what} was {before!r}, "
                    f"now {now!r}); run that one again to resume it, or replace it (--overwrite)"
                )
        if state["inputs"] != made["inputs"]:
            changed = [one["path"] for one in made["inputs"] if one not in state["inputs"]]
            return (
                f"{', '.join(changed) or 'the input'} has changed since {self.folder} was begun, so it "
                "cannot be resumed; start over (--overwrite)"
            )
        for part in () if state["all_written"] else state["parts"]:  # afterwards some become test rows
            path = self.folder / part["name"]
            if not path.is_file() or path.stat().st_size != part["bytes"]:
                return (
                    f"{path} is missing, or is not as it was written, so {self.folder} cannot be resumed; "
                    "start over (--overwrite)"
                )
        return ""

    def _resume(self, state: dict[str, Any]) -> None:
        self._begun = True
        self._parts = [Part(**part) for part in state["parts"]]
        self._all_written = state["all_written"]
        self.position, self._skip = state["position"], state["skip"]
        if not self._all_written:
            remove_leftovers(self.folder, keep=[part.name for part in self._parts])

    def _save(self, position: dict[str, Any] | None, skip: int) -> None:
        """Record the finished parts, and that the source continues ``skip`` rows after ``position``."""
        self.position, self._skip = position, skip
        state = {
            **self._made,
            "parts": [asdict(part) for part in self._parts],
            "all_written": self._all_written,
            "position": position,
            "skip": skip,
        }
        write_json(self.folder / PROGRESS_FILE, state)

    def _take_lock(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.folder} is being written by another process") from None
        except OSError:
            pass  # a file system without locks: the user must take care

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _forget(self) -> None:
        """Remove all traces: nothing worth resuming was written."""
        (self.folder / PROGRESS_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            (self.folder / TEST_FOLDER).rmdir()
        with suppress(OSError):
            if self._made_folder:
                self.folder.rmdir()
