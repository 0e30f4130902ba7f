"""A run's numbers as they come: JSON lines for programs, TensorBoard for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rowhaul._files import write_text
from rowhaul.train.metrics import MetricValues

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Writes to a run's folder, or nowhere if there is none."""

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step
        self._lines: TextIO | None = None
        self._board: Any = None

    def __enter__(self) -> RunLog:
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            path = self._folder / METRICS_FILE
            _forget_after(path, self._first_step)
            self._lines = path.open("a", encoding="utf-8")
            board = str(self._folder / "tensorboard")
            self._board = SummaryWriter(board, purge_step=self._first_step + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.close()
            self._board.close()

    def step(self, step: int, samples: int, loss: float, samples_per_second: float) -> None:
        """One training step."""
        values = {"loss": loss, "samples_per_second": samples_per_second}
        self._write("train", step, values, {"samples": samples})

    def evaluation(self, step: int, metrics: MetricValues) -> None:
        """One evaluation."""
        values = {name: value for name, value in asdict(metrics).items() if name != "note"}
        self._write("eval", step, values, {})

    def _write(self, kind: str, step: int, values: dict[str, float], more: dict[str, Any]) -> None:
        if self._lines is None:
            return
        line = {"kind": kind, "step": step, **more, **values}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will take again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(path, "".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except ValueError:  # cut short when the run was killed
        return float("inf")
