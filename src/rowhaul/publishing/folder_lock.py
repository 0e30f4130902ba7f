"""A lock on a published folder, so that no two runs that know each other's name publish there at once.

A copy of a run's folder has the run's name, too. The operating system lets go of the lock when its process
dies, however it dies. Where a file system cannot lock, as some on networks, there is none.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rowhaul.errors import ConfigError
from rowhaul.train.run_lock import LOCK_FILE, Holder


class FolderLock:
    """Holds a folder, which exists, for this process, as long as the object lives.

    Publishers of one process share it: a run that has ended may be resumed before its objects are freed.

    Raises:
        ConfigError: another process holds it.
    """

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, folder: Path) -> FolderLock | None:
        """Lock a folder; None: that cannot be done here."""
        place = folder.resolve()
        if (held := _HELD.get(place)) is not None:
            return held
        descriptor = _open(folder, os.O_RDWR | os.O_CREAT)
        if descriptor is None or not _taken(folder, descriptor):
            return None
        with suppress(OSError):  # who it is, for messages
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(Holder.this())).encode(), 0)
        return _HELD.setdefault(place, cls(descriptor))


_HELD: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def check_free(folder: Path) -> None:
    """Refuse a folder that another process holds.

    Raises:
        ConfigError: it says who that is.
    """
    if folder.resolve() in _HELD or (descriptor := _open(folder, os.O_RDWR)) is None:
        return
    if _taken(folder, descriptor):
        os.close(descriptor)


def _open(folder: Path, flags: int) -> int | None:
    try:
        return os.open(folder / LOCK_FILE, flags, 0o644)
    except OSError:  # not writable: writing the first version will say so
        return None


def _taken(folder: Path, descriptor: int) -> bool:
    """Lock a file; whether that can be done here. Otherwise it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise ConfigError(
            f"publish.to: {holder} publishes to {folder}; stop that run, wait for its end, or choose another "
            "folder (--publish). A copy of a run's folder needs one of its own"
        ) from None
    except OSError:
        os.close(descriptor)
        return False


def _holder(descriptor: int) -> str:
    with suppress(OSError, ValueError, TypeError):
        return str(Holder(**json.loads(os.pread(descriptor, 4096, 0))))
    return "another process"
