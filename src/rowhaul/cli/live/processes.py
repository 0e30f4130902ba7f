"""Commands of Rowhaul that run beside this process, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rowhaul.cluster import tied_child
from rowhaul.errors import RowhaulError

_STOP_SECONDS = 60.0
_SHOWN = 3000  # characters of a log


class Command:
    """A command in a process of its own, whose output goes to a file; use as a context.

    Args:
        name: for messages.
        arguments: of ``rowhaul``.
        log: the file.
    """

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self._name, self._log = name, log
        # Tied to this process: killed, it leaves nothing behind. Ctrl-C reaches this process alone, which
        # ends all in order.
        tied = [sys.executable, "-I", "-S", tied_child.__file__, str(os.getpid())]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*tied, sys.executable, "-m", "rowhaul", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def check(self) -> None:
        """Raise an error if it has ended."""
        if (code := self._process.poll()) is not None:
            raise RowhaulError(f"the {self._name} ended with code {code}:\n{self.output[-_SHOWN:].strip()}")

    def stop(self) -> None:
        """Tell it to end, and wait until it has."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
