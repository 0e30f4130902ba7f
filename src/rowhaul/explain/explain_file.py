"""``explain.jsonl`` in the folder of a run: what `--explain` has measured, one JSON object a line.

========  ==============================================================================================
interval  every ``log_every`` steps: what was moved and where time went since the last one
detail    after 1, 2, 4, 8, ... intervals and at the end: everything since this process began to train
timeline  with every detail: what all ranks did during a few iterations
========  ==============================================================================================
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rowhaul._files import write_text

EXPLAIN_FILE = "explain.jsonl"

Line = dict[str, Any]


class ExplainFile:
    """Appends lines; a full disk does not end the run.

    Args:
        folder: of the run; None writes nothing.
        first_step: steps taken before; lines of later ones, which will be repeated, are dropped.
    """

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._lines: TextIO | None = None
        if folder is not None:
            path = folder / EXPLAIN_FILE
            kept = [line for line in read_lines(path) if line["step"] <= first_step]
            with suppress(OSError):
                write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
                self._lines = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Write a line."""
        if self._lines is not None:
            with suppress(OSError):
                self._lines.write(json.dumps(line, separators=(",", ":")) + "\n")
                self._lines.flush()

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a JSON-lines file, none if there is no file; one cut off at the end is left out."""
    found: list[Line] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict) and "kind" in line and "step" in line:
            found.append(line)
    return found
