"""Where checkpoints are kept: in a folder of this machine, or at a URL of any storage that fsspec knows.

A place is a `Path` or a `Url`; both know ``/``, ``name`` and ``parent``. What is done at a place is a
`Storage`, one for each kind; nothing else asks which kind a place is.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rowhaul.errors import ConfigError

_LOCAL = ("file", "local")  # schemes that name a folder of this machine
_PAUSE_SECONDS = 0.5  # before what failed is tried again, doubled each time

Result = TypeVar("Result")


@dataclass(frozen=True)
class Url:
    """A folder or file behind a URL, such as ``s3://bucket/run``."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str | os.PathLike[str]) -> Url:
        return Url(f"{self.text}/{os.fspath(name)}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without its last part."""
        return Url(self.text.rpartition("/")[0])


Place = Path | Url


def as_place(given: str | os.PathLike[str] | Url) -> Place:
    """Return the place that a user names: a URL where it has a scheme, else a path."""
    if isinstance(given, Url):
        return given
    text = os.fspath(given)
    scheme, separator, rest = text.partition("://")
    if separator:
        return Path(rest) if scheme in _LOCAL else Url(text.rstrip("/"))
    if re.match(r"[A-Za-z][A-Za-z0-9+]+:/", text):
        raise ConfigError(
            f"{text} looks like a URL that has lost a slash; write scheme://…, and not as a Path"
        )
    return Path(os.path.expanduser(text))  # no shell has, in a file of settings and behind --out=


def absolute(given: str) -> str:
    """Return a place as it is to be found from any directory; an empty one stays empty."""
    place = as_place(given)
    return os.path.abspath(place) if given and isinstance(place, Path) else given


def local_folder(given: str | os.PathLike[str], option: str = "--out") -> Path:
    """Return a folder that must be of this machine."""
    if re.match(r"[A-Za-z][A-Za-z0-9+]+:/", os.fspath(given)):
        raise ConfigError(
            f"{option} {given}: logs and settings need a folder of this machine; give {option} a folder, and "
            "--checkpoints the URL"
        )
    return Path(os.path.expanduser(given))


def local_path(place: Place) -> Path | None:
    """Return a place of this machine as a path; None for others."""
    return place if isinstance(place, Path) else None


class NewFile(Protocol):
    """A file that is being written."""

    def write(self, piece: memoryview) -> None:
        """Append bytes."""

    def close(self) -> None:
        """Complete the file: its contents are safe when this returns."""

    def discard(self) -> None:
        """Give up; nothing stays."""


class OpenFile(Protocol):
    """A file that is being read."""

    size: int

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer with the bytes from ``start``; returns how many there were."""


class Storage(ABC):
    """What is done with checkpoints at one kind of place.

    Errors are `OSError`: `FileNotFoundError` for what is not there, anything else for storage that fails.
    """

    attempts: int = 1  # to write a file before the save has failed
    is_shared: bool  # all hosts reach it without a mount
    not_seen: str  # what to do when rank 0 does not find what another rank has written

    @abstractmethod
    def building(self, path: Any) -> Any:
        """Return where a checkpoint's files are written before it is complete."""

    @abstractmethod
    def stranger(self, path: Any) -> str | None:
        """Name something at a checkpoint's place that no interrupted save has left there, if there is any."""

    @abstractmethod
    def begin(self, path: Any) -> None:
        """Make room for a checkpoint's files, without what an interrupted save left there."""

    @abstractmethod
    def complete(self, path: Any, manifest: str, content: bytes) -> None:
        """Write the manifest, and make a checkpoint of what was written before."""

    @abstractmethod
    def discard(self, path: Any, manifest: str) -> None:
        """Remove what was written of a checkpoint that will not be complete; never fails."""

    @abstractmethod
    def remove(self, path: Any, manifest: str) -> None:
        """Remove a checkpoint; a removal that breaks off leaves nothing that looks complete."""

    @abstractmethod
    def set_aside(self, path: Any, manifest: str) -> None:
        """Make a damaged checkpoint one of the leftovers."""

    @abstractmethod
    def remove_leftovers(self, folder: Any, manifest: str) -> None:
        """Remove what interrupted saves and removals left in a folder of checkpoints."""

    @abstractmethod
    def folders(self, folder: Any) -> list[str]:
        """List the names of the folders in a folder; none where it does not exist."""

    @abstractmethod
    def sizes(self, folder: Any) -> dict[str, int]:
        """List the sizes of the files in a folder, by name; storage that lists none may leave files out."""

    @abstractmethod
    def is_file(self, path: Any) -> bool:
        """Whether a file is there."""

    @abstractmethod
    def exists(self, path: Any) -> bool:
        """Whether a file or folder is there, or can be taken to be."""

    @abstractmethod
    def check_writable(self, folder: Any, name: str) -> None:
        """Write and remove a small file; raises an error that says what is wrong."""

    @abstractmethod
    def create(self, path: Any) -> NewFile:
        """Begin to write a file."""

    @abstractmethod
    def open(self, path: Any) -> AbstractContextManager[OpenFile]:
        """Open a file to read."""

    def retry(self, write: Callable[[], Result]) -> Result:
        """Write something, a few times where the storage may fail for a moment."""
        for attempt in range(1, self.attempts):
            try:
                return write()
            except OSError:
                time.sleep(_PAUSE_SECONDS * 2**attempt)
        return write()

    def read(self, path: Any) -> bytes:
        """Return a small file's contents."""
        with self.open(path) as file:
            content = bytearray(file.size)
            return bytes(content[: file.read_into(0, memoryview(content))])


def storage_of(place: Place) -> Storage:
    """Return the storage of a place."""
    if isinstance(place, Url):
        from rowhaul.checkpoint.url_storage import UrlStorage  # fsspec takes a while to import

        return UrlStorage()
    from rowhaul.checkpoint.local_storage import LocalStorage

    return LocalStorage()
