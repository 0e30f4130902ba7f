"""`TrainingRecord`: writes ``training.json``, in which a run that publishes says how good it is.

It is beside what is published, and renewed whenever a window of progressive validation has ended.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rowhaul._files import write_text
from rowhaul.serve.training_file import TRAINING_FILE, read_windows

_KEPT = 300  # windows


class TrainingRecord:
    """Keeps what a run says of itself; goes on with what an earlier process has written."""

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._windows = Path(folder), read_windows(folder)

    def scored(self, step: int, values: Mapping[str, float]) -> None:
        """Write down a window that has ended; those after its step are of a run that was killed."""
        # JSON knows no NaN; a window without a click has no AUC.
        numbers = {name: one if math.isfinite(one) else None for name, one in values.items()}
        self._windows = [one for one in self._windows if one["step"] < step][-_KEPT + 1 :]
        self._windows.append({"time": time.time(), "step": step, **numbers})
        with suppress(OSError):  # the folder is not there yet, or the disk is full: training goes on
            write_text(self._folder / TRAINING_FILE, json.dumps({"windows": self._windows}) + "\n")
