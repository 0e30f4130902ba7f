"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowhaul.errors import ConfigError

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or folder to; rename it to ``path`` on success, else remove it.

    All of it is on disk before it is renamed. The temporary path has the final suffix, because some writers
    look at it.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    try:
        yield temporary
        publish(temporary, path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_new_folder(path: Path, purpose: str) -> None:
    """Refuse a place for a new folder that holds anything already, or that cannot be replaced by one."""
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link, which no folder can replace; name the place that it leads to for {purpose}"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; choose a new folder for {purpose}")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{path} exists and is not empty; choose another folder for {purpose}")
    if path.is_dir() and (os.path.ismount(path) or path.samefile(".")):
        what = "a mount" if os.path.ismount(path) else "the working directory"
        raise ConfigError(
            f"{path} is {what}, which no folder can replace; choose a new folder in it for {purpose}"
        )


def temporary_beside(path: Path) -> Path:
    """The path that a file is written to before it is renamed."""
    return path.with_name(TEMPORARY_PREFIX + path.name)


def publish(temporary: Path, path: Path) -> None:
    """Rename a written file, or folder, once all that is in it is on disk."""
    for folder, _, files in os.walk(temporary):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if temporary.is_file():
        sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's or folder's contents are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
