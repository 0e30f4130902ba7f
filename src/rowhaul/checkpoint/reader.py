"""Reading a checkpoint: nothing is believed before its checksum agrees."""

from __future__ import annotations

import errno
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from rowhaul._activity import progressed
from rowhaul.checkpoint.array_file import PIECE_BYTES, ArrayFile, Bytes, as_array, as_tensor, read_header
from rowhaul.checkpoint.layout import (
    FORMAT,
    MANIFEST_FILE,
    VERSION,
    TableEntry,
    check_inside,
    read_manifest,
)
from rowhaul.checkpoint.location import OpenFile, Place, as_place, storage_of
from rowhaul.errors import CheckpointError, DamagedCheckpointError
from rowhaul.store.row_format import RowFormat, implied_format, row_format
from rowhaul.store.row_parts import Arrays

_ENTRIES = {"facts", "groups", "tables", "files"}
_INSTEAD = "use another checkpoint"


class CheckpointReader:
    """A complete checkpoint, in a folder or at a URL: its facts, its tables, its tensors.

    Example:
        >>> reader = CheckpointReader("run/checkpoints/step-000000010")
        >>> reader.facts["step"], [table.num_rows for table in reader.tables.values()]
    """

    def __init__(self, path: str | Place) -> None:
        self.path = as_place(path)
        self._storage = storage_of(self.path)
        manifest = read_manifest(
            self.path / MANIFEST_FILE,
            (FORMAT, VERSION),
            _ENTRIES,
            of="complete checkpoint",
            hint="name a step-… folder that a finished save left",
            instead=_INSTEAD,
        )
        try:
            facts = manifest["facts"]
            implied = implied_format(facts)
            tables = [TableEntry.from_dict(entry, implied) for entry in manifest["tables"]]
            files = {name: (int(e["bytes"]), str(e["xxh3"])) for name, e in manifest["files"].items()}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{self.path / MANIFEST_FILE} is damaged: {type(error).__name__} {error}; {_INSTEAD}"
            ) from None
        for name in files:
            check_inside(name, self.path / MANIFEST_FILE, _INSTEAD)
        self._describe(self.path, facts, manifest["groups"], tables, files)

    def _describe(
        self,
        path: Place,
        facts: dict[str, Any],
        groups: list[str],
        tables: Iterable[TableEntry],
        files: dict[str, tuple[int, str]],
    ) -> None:
        """Note what there is to read; ``files`` have sizes and checksums."""
        self.path, self.facts, self.groups = path, facts, groups
        self.tables: dict[str, TableEntry] = {table.name: table for table in tables}
        self._files = files
        self._believed: set[str] = set()  # files whose checksum agreed

    @property
    def file_bytes(self) -> dict[str, int]:
        """Size of every file but the manifest, by name."""
        return {name: size for name, (size, _) in self._files.items()}

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors stored under a group's name."""
        if group not in self.groups:
            raise CheckpointError(f"{self.path}: no tensors called {group!r}; there are {self.groups}")
        name = f"tensors-{group}.safetensors"
        parts, content = read_header(self._content(name), str(self.path / name))
        return {key: as_tensor(part, content) for key, part in parts.items()}

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a file that `ShardWriter.arrays` wrote."""
        parts, content = read_header(self._content(name), str(self.path / name))
        return {key: as_array(part, content) for key, part in parts.items()}

    def rows(
        self, table: str, among: Container[str] | None = None
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield a table's rows as (keys, records), values before state; all, or those of some files.

        A format that keeps state by parts of rows gives values alone.
        """
        rows, dim = self.format(table), self.tables[table].dim
        for block in self.blocks(table, among):
            yield block["keys"], rows.decode(block, dim)

    def blocks(self, table: str, among: Container[str] | None = None) -> Iterator[Arrays]:
        """Yield a table's rows as its format has them, file by file."""
        for name in self.tables[table].files:
            if among is None or name in among:
                yield self.arrays(name)

    def format(self, table: str) -> RowFormat:
        """Return the format of a table's rows."""
        return row_format(self.tables[table].format)

    def keys(self, table: str) -> Iterator[npt.NDArray[np.int64]]:
        """The keys of a table's rows, block by block."""
        for name in self.tables[table].files:
            with self.open(name) as file:
                keys = file.get_tensor("keys")
            yield keys

    @contextmanager
    def open(self, name: str, verify: bool = True) -> Iterator[ArrayFile]:
        """Open a file to read some of it, once its checksum agrees."""
        if verify:
            self.check(name)
        with self._opened(name) as file:
            yield ArrayFile(file, str(self.path / name))

    def verify(self) -> None:
        """Check every file against the manifest."""
        self._believed.clear()
        self.check_sizes(self._files)
        for name in self._files:
            self.check(name)

    def check_sizes(self, names: Iterable[str]) -> None:
        """Check that files are there in their full size, without reading them."""
        found = self._storage.sizes(self.path)
        for name in names:
            expected = self._files[name][0]
            if name not in found and "/" not in name and not self._storage.is_file(self.path / name):
                raise self._missing(name)
            if found.get(name, expected) != expected:
                raise self._cut(name, found[name])

    def check(self, name: str) -> None:
        """Check a file against the manifest; its checksum is computed only once."""
        if name in self._believed:
            return
        with self._opened(name) as file:
            digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(PIECE_BYTES, file.size)))
            for start in range(0, file.size, PIECE_BYTES):
                digest.update(buffer[: file.read_into(start, buffer)])
                progressed()
        self._believe(name, digest.hexdigest())

    def _content(self, name: str) -> Bytes:
        """Read a file whole, and believe it if its checksum agrees."""
        with self._opened(name) as file:
            content, digest = np.empty(file.size, np.uint8), xxhash.xxh3_64()
            for start in range(0, file.size, PIECE_BYTES):
                piece = content.data[start : start + PIECE_BYTES]
                if file.read_into(start, piece) != len(piece):
                    raise self._cut(name, start)
                if name not in self._believed:
                    digest.update(piece)
        if name not in self._believed:
            self._believe(name, digest.hexdigest())
        return content

    def _believe(self, name: str, digest: str) -> None:
        size, expected = self._files[name]
        if digest != expected:
            raise DamagedCheckpointError(
                f"{self.path / name} is damaged: its {size:,} bytes have another checksum than the manifest "
                f"says; {_INSTEAD}"
            )
        self._believed.add(name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[OpenFile]:
        """Open a file of the manifest that has its full size."""
        if name not in self._files:
            raise DamagedCheckpointError(
                f"{self.path} has no file {name!r}: its manifest is damaged; use another one"
            )
        try:
            with self._storage.open(self.path / name) as file:
                if file.size != self._files[name][0]:
                    raise self._cut(name, file.size)
                yield file
        except FileNotFoundError:
            raise self._missing(name) from None
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            kind = DamagedCheckpointError if error.errno == errno.EIO else CheckpointError
            raise kind(f"{self.path / name} cannot be read: {error.strerror or error}; {_INSTEAD}") from None

    def _missing(self, name: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.path / name} is missing: the checkpoint is damaged; use another one"
        )

    def _cut(self, name: str, found: int) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.path / name} is damaged: it has {found:,} bytes, the manifest says "
            f"{self._files[name][0]:,}; {_INSTEAD}"
        )
