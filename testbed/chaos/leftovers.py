"""What a run leaves behind when it ends: nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from testbed import endings
from testbed.layout import Network

_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE_SECONDS = 5.0
_TORCH_CACHE = "torchinductor_"  # an empty folder that PyTorch makes when it is imported


class Leftovers:
    """Compares what is there with what was there at the beginning."""

    def __init__(self, network: Network, temporary: Path) -> None:
        self._network, self._temporary = network, temporary
        self._shared = set(_names(_SHARED_MEMORY))

    def found(self) -> list[str]:
        """Name what was left; processes get a moment to end."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        namespaces = [self._network.namespace(rank) for rank in self._network.ranks]
        while (pids := endings.processes_in(namespaces)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [f"process {pid}: {_command(pid)}" for pid in pids]
        left += [f"shared memory {name}" for name in set(_names(_SHARED_MEMORY)) - self._shared]
        files = [name for name in _names(self._temporary) if not name.startswith(_TORCH_CACHE)]
        left += [f"temporary file {name}" for name in files]
        return left


def _names(folder: Path) -> Iterable[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "(has ended)"
