"""A folder in which Parquet files appear, read in the natural order of their names.

A file must appear complete (written elsewhere on the same disk, then renamed), and with a name that sorts
after those that were read already (``part-10`` after ``part-9``): the position is then a name and a row,
however many files there were before, which may be removed. It also keeps hashes of the newest names that were
seen, so that a file that came late while the run was down is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul._id_kinds import join_kinds
from rowhaul.data.block import Block
from rowhaul.data.contents import FileFacts
from rowhaul.data.files import natural_order
from rowhaul.data.parquet import ParquetRows
from rowhaul.data.schema import Schema
from rowhaul.data.sources.source import POLL_SECONDS, Chunk, Position, SetAside
from rowhaul.errors import DataError

_NAMES_KEPT = 256  # in a position
_COMPARED = 8  # files that were read last, with what has their names now
_HASH_BYTES = 4  # of a name
_SETTLING_SECONDS = 10.0  # a file that is not whole and was changed so recently may still be written
# Arrow: damage, or it is gone, or offsets are damaged, or it may not be read.
_OF_THE_FILE = (None, errno.ENOENT, errno.EINVAL, errno.EACCES, errno.EPERM)

SizeAndTime = tuple[int, int]


class FolderSource:
    """Follows a folder; see `Source`."""

    patience = 3

    def __init__(self, folder: str | Path, schema: Schema, kinds: dict[str, str]) -> None:
        self._folder = Path(folder).expanduser()
        if not self._folder.is_dir():
            raise DataError(
                f"{folder}: no such folder to follow; create it, or name the folder files appear in"
            )
        self.name, self.kinds, self.notes = str(self._folder), dict(kinds), deque[str]()
        self._schema = schema
        self._seen = _Seen(())
        self._listed: list[str] = []  # the names of files, in order
        self._read: dict[str, tuple[SizeAndTime | None, str]] = {}  # the last files, with their footers
        self._trouble = ""  # what is tried again, as it was told

    def read(self, position: Position | None) -> Iterator[Chunk | None]:
        """Yield the rows of files, in order."""
        current = position["file"] if position else ""
        names = yield from self._list()
        self._seen = _Seen(_known_to(position, names[: _num_until(names, current)]))
        if position and position["rows"] < position["of"]:
            yield from self._read_file(self._folder / current, position)
        elif position:
            self._read[current] = None, position["footer"]
        while True:
            names = yield from self._list()
            num_read = _num_until(names, current)
            for name in names[:num_read]:
                if name not in self._seen:
                    why = f"its name sorts before {current}, which was read already"
                    yield _nothing_but(SetAside(str(self._folder / name), why))
                    self._seen.add(name)
            yield from self._replaced()
            if num_read == len(names):
                time.sleep(POLL_SECONDS)
                yield None
                continue
            current = names[num_read]
            self._seen.add(current)
            yield from self._read_file(self._folder / current, None)

    def event_time(self, position: Position) -> float | None:
        """Return when the file of a position was written."""
        try:
            return float((self._folder / position["file"]).stat().st_mtime)
        except OSError:
            return None

    def saved(self, position: Position) -> None:
        """Do nothing: files stay."""

    def close(self) -> None:
        """Do nothing."""

    def _list(self) -> Generator[None, None, list[str]]:
        """List the files as soon as that can be done."""
        while True:
            try:
                names = self._names()
            except OSError as error:
                self._tell(self._folder, error)
                time.sleep(POLL_SECONDS)
                yield None
            else:
                self._trouble = ""
                return names

    def _tell(self, path: Path, error: Exception) -> None:
        """Note why something is tried again, once."""
        trouble = f"{path} cannot be read now ({error.__cause__ or error}); trying again"
        if trouble != self._trouble:
            self.notes.append(trouble)
        self._trouble = trouble

    def _names(self) -> list[str]:
        """List the files; only what is new has to find its place among the many that were there before."""
        with os.scandir(self._folder) as entries:
            found = {
                one.name
                for one in entries
                if one.name.endswith(".parquet") and not one.name.startswith((".", "_")) and one.is_file()
            }
        if len(found) != len(self._listed) or not found.issuperset(self._listed):
            kept = [name for name in self._listed if name in found]
            new = sorted(found.difference(kept), key=_order)
            for name in new if kept else ():
                insort(kept, name, key=_order)
            self._listed = kept or new
        return self._listed

    def _remember(self, name: str, found: SizeAndTime | None, footer: str) -> None:
        """Note a file that is read, or set aside, as it is now."""
        self._read[name] = found, footer
        while len(self._read) > _COMPARED:
            del self._read[next(iter(self._read))]

    def _replaced(self) -> Iterator[Chunk]:
        """Set files aside, once, that are others than those that were read under their names."""
        for name, (before, footer) in list(self._read.items()):
            path = self._folder / name
            now = _size_and_time(path)
            if now in (None, before) or (found := _footer(path)) is None:
                continue  # gone, or not whole yet
            self._read[name] = now, footer
            if not footer:
                del self._read[name]
                self.notes.append(f"{path} is whole now, but was set aside; give it a new name")
            elif found != footer:
                del self._read[name]
                why = "it was replaced after it was read; give each file a new name"
                yield _nothing_but(SetAside(str(path), why))

    def _read_file(self, path: Path, position: Position | None) -> Iterator[Chunk | None]:
        """Yield a file's rows, from a position within it; a file that cannot be trained on is set aside."""
        while True:
            before = _size_and_time(path)
            try:
                rows = ParquetRows([path], self._schema, with_label=True)
                self._check_kinds(rows.key_kinds)
                break
            except (DataError, OSError) as error:
                if _may_pass(error):
                    self._tell(path, error)
                elif position is not None:  # a part of it is trained
                    raise
                # It may have become whole since: then it is not the file that was looked at.
                elif _size_and_time(path) == before and not _may_still_be_written(path):
                    self._remember(path.name, before, "")
                    yield _nothing_but(SetAside(str(path), str(error)))
                    return
            time.sleep(POLL_SECONDS)
            yield None
        facts, seen = rows.file_facts[0], self._seen.kept()
        first = position["rows"] if position else 0
        if position and position["footer"] != facts.footer:
            raise DataError(
                f"{path} has changed since {first:,} of its rows were trained; restore it, or start a new run"
            )
        self._remember(path.name, (facts.bytes, facts.mtime_ns), facts.footer)
        for place, group in enumerate(rows.row_groups):
            if group.first_row + group.num_rows <= first:
                continue
            row = max(first, group.first_row)
            blocks = rows.read(place, skip=row - group.first_row)
            while True:
                try:
                    block = next(blocks, None)
                except (DataError, OSError) as error:
                    if _may_pass(error):
                        self._tell(path, error)
                        time.sleep(POLL_SECONDS)
                        yield None
                        blocks = rows.read(place, skip=row - group.first_row)
                        continue
                    why = f"{error}; rows from {row:,} on are left out"
                    yield _nothing_but(SetAside(str(path), why))
                    return
                if block is None:
                    break
                yield Chunk(block, partial(_after, path.name, facts.rows, facts.footer, seen, row))
                row += len(block)

    def _check_kinds(self, found: dict[str, str]) -> None:
        for name, kind in found.items():
            before = self.kinds.get(name, kind)
            joined = join_kinds(before, kind)
            if joined is None:
                raise DataError(
                    f"id column {name!r} holds {kind} ids, but {before} ids so far, which are different keys"
                )
            self.kinds[name] = joined


def _after(name: str, num_rows: int, footer: str, seen: dict[str, str], first: int, count: int) -> Position:
    return {"file": name, "rows": first + count, "of": num_rows, "footer": footer, "seen": seen}


class _Seen:
    """Names that were seen, so that one that comes late is noticed."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)
        self._newest = sorted(self._names, key=_order)[-_NAMES_KEPT:]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        """Add a name that was not seen before."""
        self._names.add(name)
        insort(self._newest, name, key=_order)
        del self._newest[:-_NAMES_KEPT]

    def kept(self) -> dict[str, str]:
        """Return what a position keeps: hashes of the newest, and where those begin."""
        older_than = self._newest[0] if len(self._names) > len(self._newest) else ""
        return {"hashes": "".join(map(_hash, reversed(self._newest))), "older_than": older_than}


def _hash(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=_HASH_BYTES).hexdigest()


def _known_to(position: Position | None, names: list[str]) -> set[str]:
    """Return those names, in order, that a run has seen; of older ones it is taken to have seen all."""
    kept = position.get("seen") if position else None  # earlier versions kept nothing
    if kept is None:
        return set(names)
    hashes, size = kept["hashes"], 2 * _HASH_BYTES
    seen = {hashes[first : first + size] for first in range(0, len(hashes), size)}
    older = _num_until(names, kept["older_than"])
    return set(names[:older]) | {name for name in names[older:] if _hash(name) in seen}


@lru_cache(maxsize=1 << 16)
def _order(name: str) -> tuple[list[str | int], str]:
    """A sort key by which ``clicks.parquet`` is before ``clicks2.parquet``."""
    return natural_order(Path(Path(name).stem)), name


def _num_until(names: list[str], last: str) -> int:
    """Count the names, in order, that do not come after one; before the first file that is ``""``."""
    return bisect_right(names, _order(last), key=_order) if last else 0


def _size_and_time(path: Path) -> SizeAndTime | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _footer(path: Path) -> str | None:
    """Return the digest of a file's footer; None: it is not whole, or cannot be read now."""
    try:
        with pq.ParquetFile(path) as opened:
            return FileFacts.of(path, opened.metadata).footer
    except (pa.ArrowException, OSError):
        return None


def _may_pass(error: Exception) -> bool:
    """Whether it is the system that could not read a file, which says nothing of what is in there."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _OF_THE_FILE


def _may_still_be_written(path: Path) -> bool:
    try:
        if time.time() - path.stat().st_mtime >= _SETTLING_SECONDS:
            return False
        with pq.ParquetFile(path):
            return False  # whole, so waiting will not mend it
    except FileNotFoundError:
        return False
    except (pa.ArrowException, OSError):
        return True


def _nothing_but(one: SetAside) -> Chunk:
    """A chunk without samples."""
    nothing = Block((), np.empty((0, 0), np.float32))
    return Chunk(nothing, lambda count: {}, [(0, one)])
