"""A lock on a run's folder, so that no second run writes into it.

The file is locked by the operating system, which lets go when the process dies, however it dies; network file
systems pass such locks on between hosts, most of the time. The file also says who holds it, and is touched
every few seconds. Where the lock itself proves nothing, that is what is looked at.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rowhaul.errors import ConfigError

LOCK_FILE = ".lock"
_BEAT_SECONDS = 2.0
_WATCH_SECONDS = 10.0  # for a beat of another host
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    started: float  # seconds since 1970: a process id may be used again
    rank: int
    since: str

    @classmethod
    def this(cls) -> Holder:
        """Return this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        started = psutil.Process().create_time()
        return cls(socket.gethostname(), os.getpid(), started, int(os.environ.get("RANK", "0")), since)

    def __str__(self) -> str:
        return f"process {self.pid} (rank {self.rank}) on {self.host}, since {self.since}"

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this host that has ended."""
        if self.host != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1.0
        except psutil.Error:
            return True


class RunLock:
    """Holds a run's folder, which is created if need be; a context manager.

    Leaving removes the lock, and the folder, if the run has put nothing there.

    Attributes:
        note: whose lock was taken over; empty: nobody's.

    Raises:
        ConfigError: another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK_FILE
        self._created: list[Path] = []  # folders, the innermost first
        self._ended = threading.Event()
        self.note = ""

    def __enter__(self) -> RunLock:
        if self._folder.exists() and not self._folder.is_dir():
            raise ConfigError(f"{self._folder} is not a folder; choose another --out")
        missing = [one for one in (self._folder, *self._folder.parents) if not one.exists()]
        self._created = missing
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)  # again: a holder that ends may remove it
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._take()
            except BaseException:
                os.close(self._descriptor)
                raise
            if os.stat(self._descriptor).st_nlink:
                break
            os.close(self._descriptor)  # its last holder has just removed it
            self.note = ""
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        for folder in self._created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()

    def _take(self) -> None:
        proves = True  # the lock alone
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._refusal() from None
            proves = False
        before = self._holder()
        if before is not None:
            of_this_host = before.host == socket.gethostname()
            if (not proves and of_this_host and not before.is_gone) or (not of_this_host and self._beats()):
                raise self._refusal()
            self.note = f"took over the lock of {before}, which is gone"
        content = json.dumps(asdict(Holder.this())).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        os.fsync(self._descriptor)

    def _holder(self) -> Holder | None:
        with suppress(OSError, ValueError, TypeError):
            return Holder(**json.loads(os.pread(self._descriptor, 4096, 0)))
        return None

    def _beats(self) -> bool:
        """Whether a process of another host touches the file: its lock may not reach this one."""
        until = time.monotonic() + _WATCH_SECONDS
        with suppress(FileNotFoundError):  # that run has ended meanwhile, and removed it
            before = os.stat(self._path).st_mtime_ns
            while time.monotonic() < until:
                if os.stat(self._path).st_mtime_ns != before:
                    return True
                time.sleep(0.1)
        return False

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def _refusal(self) -> ConfigError:
        holder = self._holder()
        return ConfigError(
            f"{self._folder} is in use by {holder or 'another process'}; stop that run, wait for its end, or "
            "choose another --out"
        )
