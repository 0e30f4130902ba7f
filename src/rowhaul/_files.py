"""Files that are whole under their name or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A temporary path for a file or folder to write; it takes the name ``path`` when all went well.

    Otherwise it is removed. Its ending is the final one's, since some writers look at it.
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
    """Write a text file whole or not at all."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def temporary_beside(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(TEMPORARY_PREFIX + path.name)


def publish(temporary: Path, path: Path) -> None:
    """Give a written file its name, once its contents are on disk."""
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
