"""The log of a rank as JSON lines: what the package and other libraries log, and Python's warnings.

A file is kept when a run is resumed. It is renamed to ``rank-0003.jsonl.1`` when it is full, and that one to
``.2``; the oldest is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rowhaul.errors import ConfigError

MOST_BYTES = 64 << 20  # of a file
OLD_FILES = 3  # kept beside it
_PACKAGE = "rowhaul"
_WARNINGS = logging.getLogger("py.warnings")


@contextlib.contextmanager
def json_log(folder: Path, rank: int, step: Callable[[], int]) -> Iterator[None]:
    """Write this process's log to the folder, also why the block fails.

    Handlers are attached to the root logger, so this is for programs, not for libraries. Warnings stay
    visible on the terminal.

    Args:
        folder: made if there is none.
        rank: of this process.
        step: how far the run has come.
    """
    path = folder / f"rank-{rank:04d}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MOST_BYTES, backupCount=OLD_FILES, encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(
            f"{path}: the log cannot be written: {error.strerror or error}; give another --log-folder"
        ) from None
    handler.setFormatter(_JsonFormatter(rank, step))
    root, package = logging.getLogger(), logging.getLogger(_PACKAGE)
    handlers: list[logging.Handler] = [handler]
    if not root.handlers:  # Python would print warnings only as long as there is no handler
        handlers.append(_on_terminal())
    level, shown = package.level, warnings.showwarning
    for one in handlers:
        root.addHandler(one)
    package.setLevel(logging.INFO)
    warnings.showwarning = _logged(shown)
    try:
        yield
    except BaseException as error:
        failed = not isinstance(error, KeyboardInterrupt)
        logging.getLogger(_PACKAGE).log(
            logging.ERROR if failed else logging.WARNING,
            "the run has failed: %s" if failed else "interrupted%s",
            error if failed else "",
            exc_info=failed,
            extra={"event": "failed" if failed else "interrupted", "only_file": True},
        )
        raise
    finally:
        warnings.showwarning = shown
        package.setLevel(level)
        for one in handlers:
            root.removeHandler(one)
            one.close()


class _JsonFormatter(logging.Formatter):
    """One object a line: time, level, rank, host, step, event, message, logger and the event's numbers."""

    def __init__(self, rank: int, step: Callable[[], int]) -> None:
        super().__init__()
        self._rank, self._step, self._host = rank, step, socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Make the line."""
        line = dict(getattr(record, "values", {}))
        line |= {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "host": self._host,
            "step": getattr(record, "step", None) or self._step(),
            "event": getattr(record, "event", "warning" if record.name == _WARNINGS.name else "message"),
            "message": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        first = ("time", "level", "rank", "host", "step", "event", "message")
        ordered = {name: line.pop(name) for name in first} | line
        return json.dumps({name: _plain(value) for name, value in ordered.items()}, default=str)


def _plain(value: Any) -> Any:
    """A number that JSON does not know becomes text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _on_terminal() -> logging.Handler:
    """Show warnings of libraries as Python does without any handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.name != _WARNINGS.name and not hasattr(record, "only_file"))
    return handler


def _logged(shown: Callable[..., None]) -> Callable[..., None]:
    """Show a warning as before, and log it."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        shown(message, category, filename, lineno, file, line)
        if file is None:
            _WARNINGS.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)

    return show
