"""Checkpoints in a folder of this machine: built beside their place, synced, and renamed when complete."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rowhaul._files import sync
from rowhaul.checkpoint.location import NewFile, OpenFile, Storage

_UNFINISHED = ".unfinished"
_DAMAGED = ".damaged"


class LocalStorage(Storage):
    """Files and folders of the operating system."""

    is_shared = False
    not_seen = "it is not the same folder; mount one folder at the same path on every host, or use a URL"

    def building(self, path: Path) -> Path:
        """Return the folder beside a checkpoint's final place."""
        path = Path(os.path.abspath(path))  # "." has no name
        return path.with_name(path.name + _UNFINISHED)

    def stranger(self, path: Path) -> str | None:
        """Name a file there, or anything in a folder: unfinished checkpoints are beside their places."""
        if path.is_dir():
            return min((one.name for one in path.iterdir()), default=None)
        return path.name if path.exists() else None

    def begin(self, path: Path) -> None:
        """Make an empty folder."""
        folder = self.building(path)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def complete(self, path: Path, manifest: str, content: bytes) -> None:
        """Write the manifest, then rename the folder once everything is on disk."""
        folder = self.building(path)
        (folder / manifest).write_bytes(content)
        sync(folder / manifest)
        sync(folder)
        folder.rename(path)  # replaces an empty folder; another one would have been refused at the beginning
        sync(path.parent)

    def discard(self, path: Path, manifest: str) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.building(path), ignore_errors=True)

    def remove(self, path: Path, manifest: str) -> None:
        """Rename a checkpoint to a leftover, and remove that."""
        folder = self.building(path)
        shutil.rmtree(folder, ignore_errors=True)
        path.rename(folder)
        shutil.rmtree(folder)

    def set_aside(self, path: Path, manifest: str) -> None:
        """Rename a damaged checkpoint."""
        aside = path.with_name(path.name + _DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def remove_leftovers(self, folder: Path, manifest: str) -> None:
        """Remove unfinished and damaged checkpoints."""
        for suffix in (_UNFINISHED, _DAMAGED):
            for path in folder.glob(f"step-*{suffix}"):
                shutil.rmtree(path, ignore_errors=True)

    def folders(self, folder: Path) -> list[str]:
        """List the folders in a folder."""
        return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []

    def sizes(self, folder: Path) -> dict[str, int]:
        """List the files in a folder."""
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def is_file(self, path: Path) -> bool:
        """Whether a file is there."""
        return path.is_file()

    def exists(self, path: Path) -> bool:
        """Whether a file or folder is there."""
        return path.exists()

    def check_writable(self, folder: Path, name: str) -> None:
        """Write and remove a file in a folder, which is created if it does not exist."""
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{name}-{secrets.token_hex(4)}"
        try:
            probe.touch()
        finally:
            probe.unlink(missing_ok=True)

    def create(self, path: Path) -> NewFile:
        """Create a file, and its folder where a network file system does not show it yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return _NewFile(path)

    @contextmanager
    def open(self, path: Path) -> Iterator[OpenFile]:
        """Open a file to read."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield _OpenFile(descriptor)
        finally:
            os.close(descriptor)


class _NewFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, piece: memoryview) -> None:
        while len(piece):
            piece = piece[os.write(self._descriptor, piece) :]

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def discard(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(OSError):
            self._path.unlink()


class _OpenFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, start: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer) and (count := os.preadv(self._descriptor, [buffer[done:]], start + done)):
            done += count
        return done
