"""Checkpoints at a URL, through fsspec.

Object stores cannot rename: files go to their final names, and the manifest last. A checkpoint without a
manifest is not complete; the next save removes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from rowhaul.checkpoint.location import NewFile, OpenFile, Storage, Url
from rowhaul.checkpoint.url_errors import explained

_FILE_OF_CHECKPOINT = re.compile(
    r"(tensors-.+|rows-\d{4,}-([rw]\d{4,}-)?\d{5,}|layout-[rw]\d{4,}-\d{5,}|ledger-[rw]\d{4,})\.safetensors"
    r"|damaged-manifest\.json"
)
_PLAIN_NAMES = {f"{name}.safetensors" for name in ("schedule", "hot", "pruning", "utilities", "budget")}
_HAVE_FOLDERS = {"sftp", "ssh", "ftp", "hdfs", "webhdfs", "smb"}  # that must exist before a file is written


class UrlStorage(Storage):
    """Any storage that fsspec has a file system for."""

    attempts = 3
    is_shared = True
    not_seen = "it is not the same storage; give every rank the same URL, endpoint and account"

    def building(self, path: Url) -> Url:
        """Return the checkpoint's own place."""
        return path

    def stranger(self, path: Url) -> str | None:
        """Name what is no file of a checkpoint: unfinished ones are where they will be.

        Files whose names anybody might choose count only beside others, or in a folder for a step.
        """
        own, found = str(path).rstrip("/").rpartition("/")[2], self._list(path)
        names = sorted(
            _last(one) for one in found if one["size"] or one["type"] == "directory" or _last(one) != own
        )  # some stores list a folder in itself, as an empty file
        folders = {_last(one) for one in found if one["type"] == "directory"}
        leftovers = {name for name in names if _FILE_OF_CHECKPOINT.fullmatch(name)} - folders
        if leftovers or own.startswith("step-"):
            leftovers |= _PLAIN_NAMES - folders
        return next((name for name in names if name not in leftovers), None)

    def begin(self, path: Url) -> None:
        """Remove what an interrupted save left."""
        self._remove_all(path)

    def complete(self, path: Url, manifest: str, content: bytes) -> None:
        """Write the manifest."""
        self._write(path / manifest, content)

    def discard(self, path: Url, manifest: str) -> None:
        """Remove what was written; what cannot be removed now is a leftover."""
        with suppress(OSError):
            self.remove(path, manifest)

    def remove(self, path: Url, manifest: str) -> None:
        """Remove the manifest, then the rest."""
        if self.is_file(path / manifest):
            self._remove_file(path / manifest)
        self._remove_all(path)

    def set_aside(self, path: Url, manifest: str) -> None:
        """Rename the manifest."""
        self._write(path / f"damaged-{manifest}", self.read(path / manifest))
        self._remove_file(path / manifest)

    def remove_leftovers(self, folder: Url, manifest: str) -> None:
        """Remove checkpoints without a manifest, but no folder that holds anything else."""
        for name in self.folders(folder):
            path = folder / name
            if name.startswith("step-") and not self.is_file(path / manifest) and self.stranger(path) is None:
                self._remove_all(path)

    def folders(self, folder: Url) -> list[str]:
        """List the folders in a folder."""
        return [_last(one) for one in self._list(folder) if one["type"] == "directory"]

    def sizes(self, folder: Url) -> dict[str, int]:
        """List the files in a folder whose sizes the storage lists: a web server's pages have none."""
        files = [one for one in self._list(folder) if one["type"] == "file"]
        return {_last(one): int(one["size"]) for one in files if one["size"] is not None}

    def is_file(self, path: Url) -> bool:
        """Whether a file is there."""
        try:
            with explained(path):
                filesystem, name = _at(path)
                return bool(filesystem.info(name)["type"] == "file")
        except FileNotFoundError:
            return False

    def exists(self, path: Url) -> bool:
        """Take every folder to be there: object stores have none."""
        return True

    def check_writable(self, folder: Url, name: str) -> None:
        """Write and remove an object."""
        self._write(folder / name, b"rowhaul")
        self._remove_file(folder / name)

    def create(self, path: Url) -> NewFile:
        """Begin an upload."""
        return _NewFile(path)

    @contextmanager
    def open(self, path: Url) -> Iterator[OpenFile]:
        """Open a file to read."""
        yield _OpenFile(path)

    def _list(self, folder: Url) -> list[dict[str, Any]]:
        try:
            with explained(folder):
                filesystem, name = _at(folder)
                filesystem.invalidate_cache()
                found: list[dict[str, Any]] = filesystem.ls(name, detail=True)
                return found
        except FileNotFoundError:
            return []

    def _remove_file(self, path: Url) -> None:
        with explained(path):
            filesystem, name = _at(path)
            filesystem.rm_file(name)

    def _remove_all(self, path: Url) -> None:
        with suppress(FileNotFoundError), explained(path):
            filesystem, name = _at(path)
            filesystem.invalidate_cache()
            filesystem.rm(name, recursive=True)

    def _write(self, path: Url, content: bytes) -> None:
        file = self.create(path)
        try:
            file.write(memoryview(content))
            file.close()
        except BaseException:
            file.discard()
            raise


def _at(url: Url) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; listings are not cached, for others write, too."""
    found: tuple[Any, str] = fsspec.core.url_to_fs(str(url), use_listings_cache=False, **_options(url))
    return found


def _options(url: Url) -> dict[str, Any]:
    """Keep the layers below from multiplying their retries to minutes; a user's settings come first."""
    if not str(url).startswith(("s3://", "s3a://")) or "AWS_MAX_ATTEMPTS" in os.environ:
        return {}
    given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 10, **given}}


def _last(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


class _NewFile:
    def __init__(self, path: Url) -> None:
        self._path = path
        with explained(path, creating=True):
            filesystem, name = _at(path)
            if str(path).partition("://")[0] in _HAVE_FOLDERS:
                filesystem.makedirs(name.rpartition("/")[0], exist_ok=True)
            self._file = filesystem.open(name, "wb")

    def write(self, piece: memoryview) -> None:
        with explained(self._path, creating=True):
            self._file.write(piece)

    def close(self) -> None:
        with explained(self._path, creating=True):
            self._file.close()

    def discard(self) -> None:
        with suppress(Exception):  # what an upload that broke off raises is of no interest any more
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # or it would be uploaded when it is collected


class _OpenFile:
    def __init__(self, path: Url) -> None:
        self._url = path
        with explained(path):
            self._filesystem, self._path = _at(path)
            self.size = int(self._filesystem.info(self._path)["size"])

    def read_into(self, start: int, buffer: memoryview) -> int:
        end = min(start + len(buffer), self.size)
        if start >= end:
            return 0
        with explained(self._url):
            content = self._filesystem.cat_file(self._path, start=start, end=end)
        if len(content) > end - start:  # a web server that does not know ranges sends the whole file
            content = content[start:end]
        buffer[: len(content)] = content
        return len(content)
