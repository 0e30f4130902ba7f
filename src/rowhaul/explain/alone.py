"""`--explain` of a run in one process: no rows move, so all there is to tell is where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rowhaul.explain.explain_file import ExplainFile, Line

_BETWEEN_SHOWN = 30.0  # seconds, at least, between two summaries on the screen


class AloneExplainer:
    """Measures how long training waits for data, and how long it computes.

    Args:
        every: steps between two lines.
        first_step: steps taken before.
        folder: of the run; None writes nothing.
    """

    def __init__(self, every: int, first_step: int, folder: Path | None) -> None:
        self.show: Callable[[Line], None] = lambda detail: None
        self._every, self._step = every, first_step
        self._file = ExplainFile(folder, first_step)
        self._seconds = {"compute": 0.0, "data": 0.0}
        self._num_steps, self._logged = 0, (0, 0.0, 0.0)
        self._shown_at: float | None = None
        self._loading = 0.0  # of the batch that came last

    def loaded(self, seconds: float) -> None:
        """Note how long a batch took to come."""
        self._loading = seconds

    def computed(self, seconds: float) -> None:
        """Note how long its step took; the first, which may compile kernels, is left out."""
        self._step += 1
        if self._shown_at is None:
            self._shown_at = time.monotonic()
            return
        self._seconds["data"] += self._loading
        self._seconds["compute"] += seconds
        self._num_steps += 1
        if self._step % self._every == 0:
            self._write_interval()
            if time.monotonic() - self._shown_at >= _BETWEEN_SHOWN:
                self._shown_at = time.monotonic()
                self.show(self._detail(final=False))

    def finish(self) -> None:
        """Write the last lines."""
        if self._num_steps:
            self._write_interval()
            detail = self._detail(final=True)
            self._file.append(detail)
            self.show(detail)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_interval(self) -> None:
        steps, compute, data = self._logged
        seconds = {
            "compute": round(self._seconds["compute"] - compute, 6),
            "data": round(self._seconds["data"] - data, 6),
        }
        count = self._num_steps - steps
        if count:
            line = {"kind": "interval", "step": self._step, "iterations": count}
            self._file.append(line | {"ranks": [{"iterations": count, "seconds": seconds}]})
        self._logged = self._num_steps, self._seconds["compute"], self._seconds["data"]

    def _detail(self, final: bool) -> Line:
        mean = {name: round(value / self._num_steps, 7) for name, value in self._seconds.items()}
        return {
            "kind": "detail",
            "step": self._step,
            "final": final,
            "iterations": self._num_steps,
            "seconds": mean,
        }
