"""Logs a run's numbers: JSON lines for programs, TensorBoard for people, records of Python's logging."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

from rowhaul._activity import Activity, doing
from rowhaul._files import write_text
from rowhaul.monitoring.monitor import NO_MONITOR, Monitor
from rowhaul.nn.row_source import RowNote
from rowhaul.schedule.plan import RowCounts
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import ProgressiveValues

METRICS_FILE = "metrics.jsonl"
BOARD = "tensorboard"  # a folder
_SAVED = "checkpoint"  # the event that one was saved, and its line

_log = logging.getLogger("rowhaul.train")


class TrainingLog:
    """The log of a run, with its speed: samples a second of training alone.

    Args:
        folder: of the run; None writes nothing.
        first_step: steps taken before.
        every: steps between two lines.
        monitor: of the run.
    """

    def __init__(
        self, folder: Path | None, first_step: int, every: int, monitor: Monitor = NO_MONITOR
    ) -> None:
        self._folder, self._first_step, self.monitor = folder, first_step, monitor
        self._lines: TextIO | None = None
        self._board: Any = None
        self._evaluated: set[int] = set()
        self._saved: set[int] = set()
        self.every, self.step_number = every, first_step
        self.num_steps = 0  # by this run
        self.row_counts: RowCounts | None = None  # so far, where tables have policies
        self._began, self._samples_before = time.perf_counter(), 0
        self._seconds, self._samples = 0.0, 0  # of training alone, after the first step
        self._logged = (0.0, 0)

    def __enter__(self) -> Self:
        if self._folder is not None:
            path = self._folder / METRICS_FILE
            kept = _lines_until(path, self._first_step)
            write_text(path, "".join(_json(line) for line in kept))
            self._evaluated = {line["step"] for line in kept if line["kind"] == "eval"}
            self._saved = {line["step"] for line in kept if line["kind"] == _SAVED}
            self._lines = path.open("a", encoding="utf-8")
            self._open_board(self._first_step + 1)
        return self

    def __exit__(self, *error: object) -> None:
        if self._lines is not None:
            with suppress(OSError):
                self._lines.close()
            self._show(lambda board: board.close())

    def _open_board(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        assert self._folder is not None
        self._board = SummaryWriter(str(self._folder / BOARD), purge_step=purge_step)

    def _append(self, line: dict[str, Any]) -> None:
        """Write a line; while the disk is full, training goes on with what is buffered."""
        assert self._lines is not None
        with suppress(OSError):
            self._lines.write(_json(line))
            self._lines.flush()

    def _show(self, add: Callable[[Any], object]) -> None:
        """Add something to TensorBoard, whose writer gives up for good on a full disk: begin another then."""
        try:
            if self._board is None:
                self._open_board()
            add(self._board)
        except OSError:
            self._board = None

    def event(self, name: str, step: int, message: str, **values: Any) -> None:
        """Log an event through Python's logging, on this rank; saved checkpoints get a line, too."""
        _log.info(message, extra={"event": name, "step": step, "values": values})
        if name == _SAVED and self._lines is not None and step not in self._saved:
            self._saved.add(step)
            with doing(Activity.SAVING):  # where the disk does not answer
                self._append({"kind": _SAVED, "step": step})

    def row_note(self, step: int, note: RowNote) -> None:
        """Something a row source did: its numbers, and its counts as histograms."""
        self.write(
            note.kind, step, dict(note.values), **{name: list(one) for name, one in note.counts.items()}
        )
        for name, counts in note.counts.items() if self._lines is not None else ():
            numbers = range(len(counts))
            sums = [sum(number**power * count for number, count in enumerate(counts)) for power in (1, 2)]
            histogram = (0, len(counts) - 1, sum(counts), *sums, [one + 0.5 for one in numbers], list(counts))
            self._show(partial(_add_histogram, f"{note.kind}/{name}", histogram, step))

    def note(self, step: int, text: str) -> None:
        """A note in words."""
        self.event("note", step, text)
        if self._lines is not None:
            self._append({"kind": "note", "step": step, "text": text})
            self._show(lambda board: board.add_text("note", text, step))

    def evaluation(self, step: int, metrics: MetricValues) -> None:
        """One evaluation, unless the run was resumed and has it already."""
        numbers, by_feature = metrics.numbers(), metrics.unknown_by_feature
        self.monitor.evaluated(step, numbers)
        text = f"AUC {metrics.auc:.4f}, log loss {metrics.log_loss:.4f}"
        if math.isnan(metrics.log_loss):  # the label is a number
            errors = {name: value for name, value in numbers.items() if name.endswith("/rmse")}
            text = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
        self.event("evaluation", step, text, **numbers)
        if step not in self._evaluated:
            self.write("eval", step, numbers, unknown_by_feature=by_feature)

    def scored(self, step: int, values: ProgressiveValues) -> None:
        """A window of progressive validation."""
        numbers = values.by_name()
        self.monitor.scored(step, numbers)
        self.event("progressive", step, values.text(), **numbers)
        self.write("progressive", step, numbers)

    def write(self, kind: str, step: int, values: dict[str, float], **more: Any) -> None:
        """Numbers of a kind, which TensorBoard shows too, and more for the line alone."""
        if self._lines is None:
            return
        line = {"kind": kind, "step": step, **more, **values}
        self._append(line)
        self._show(
            lambda board: [board.add_scalar(f"{kind}/{name}", one, step) for name, one in values.items()]
        )

    @property
    def samples_per_second(self) -> float:
        """The speed of training: without the first step, evaluations and checkpoints."""
        return self._samples / self._seconds if self._seconds else 0.0

    @property
    def timed(self) -> tuple[float, int]:
        """The seconds of training that `samples_per_second` counts, and their samples."""
        return self._seconds, self._samples

    def resume_clock(self, samples: int) -> None:
        """Start timing again after a pause."""
        self._began, self._samples_before = time.perf_counter(), samples

    def stepped(self, step: int, samples: int, loss: float) -> None:
        """Time a step; write a line when one is due."""
        now = time.perf_counter()
        self.num_steps += 1
        self.step_number = step
        self.monitor.stepped(step, samples, loss)
        if self.num_steps > 1:  # the first may have compiled kernels
            self._seconds += now - self._began
            self._samples += samples - self._samples_before
        self.resume_clock(samples)
        if step % self.every == 0:
            seconds, trained = self._seconds - self._logged[0], self._samples - self._logged[1]
            speed = trained / seconds if seconds else 0.0
            self.write("train", step, {"loss": loss, "samples_per_second": speed}, samples=samples)
            self._logged = (self._seconds, self._samples)
            self.monitor.logged(speed)
            self.event(
                "train", step, f"loss {loss:.4f}, {speed:,.0f} samples a second",
                loss=loss, samples_per_second=speed, samples=samples,
            )  # fmt: skip
            self.write_more(step)

    def write_more(self, step: int) -> None:
        """Write what else a line is due for; nothing here."""


def unknown_keys_of(folder: Path) -> dict[str, float] | None:
    """The shares of ids never trained in a run's latest evaluation; None if there was none."""
    lines = [line for line in _lines_until(folder / METRICS_FILE, sys.maxsize) if line["kind"] == "eval"]
    return lines[-1].get("unknown_by_feature") if lines else None


def last_saved_step(folder: Path) -> int | None:
    """The step of the last checkpoint that a run's log tells of; those of earlier versions tell of none."""
    lines = [line for line in _lines_until(folder / METRICS_FILE, sys.maxsize) if line["kind"] == _SAVED]
    return lines[-1]["step"] if lines else None


def _add_histogram(name: str, histogram: tuple[Any, ...], step: int, board: Any) -> None:
    board.add_histogram_raw(name, *histogram, step)


def _json(line: dict[str, Any]) -> str:
    """A line of the log; JSON knows no NaN, so what is not defined is null."""
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of steps that a resumed run will not repeat."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:  # truncated when the run was killed
            break
        if line["step"] <= step:
            kept.append(line)
    return kept
