"""A run's numbers as they come: JSON lines for programs, TensorBoard for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rowhaul._files import write_text
from rowhaul.pruning.report import PruneReport
from rowhaul.train.metrics import MetricValues

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Writes to a run's folder, or nowhere if there is none."""

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step
        self._lines: TextIO | None = None
        self._board: Any = None
        self._evaluated: set[int] = set()

    def __enter__(self) -> RunLog:
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            path = self._folder / METRICS_FILE
            kept = _lines_until(path, self._first_step)
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._evaluated = {line["step"] for line in kept if line["kind"] == "eval"}
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

    def means(self, step: int, values: dict[str, float]) -> None:
        """What iterations on a cluster were like, on average."""
        self._write("cluster", step, values, {})

    def rows(self, step: int, values: dict[str, float]) -> None:
        """How rows came and went, a step, on average."""
        self._write("tables", step, values, {})

    def pruning(self, step: int, report: PruneReport) -> None:
        """What a pruning has left: totals, the values a row of each table holds, and rows by their chunks."""
        values = {
            "rows": float(report.num_rows),
            "ratio": report.ratio,
            "chunks": float(report.num_chunks),
            "bytes": float(report.allocated_bytes),
            **{f"dims/{table.name}": table.mean_dims for table in report.tables},
        }
        counts = report.rows_by_chunks
        self._write("prune", step, values, {"rows_by_chunks": list(counts)})
        if self._board is not None:
            numbers = range(len(counts))
            sums = [sum(number**power * count for number, count in enumerate(counts)) for power in (1, 2)]
            self._board.add_histogram_raw(
                "prune/chunks of a row", 0, len(counts) - 1, sum(counts), *sums,
                [number + 0.5 for number in numbers], list(counts), step,
            )  # fmt: skip

    def note(self, step: int, text: str) -> None:
        """Something worth knowing, in words."""
        if self._lines is not None:
            self._lines.write(json.dumps({"kind": "note", "step": step, "text": text}) + "\n")
            self._lines.flush()
            self._board.add_text("note", text, step)

    def evaluation(self, step: int, metrics: MetricValues) -> None:
        """One evaluation, unless the run was resumed and has it already."""
        if step in self._evaluated:
            return
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


def _lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of steps that a resumed run will not take again."""
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:  # cut short when the run was killed
            break
        if line["step"] <= step:
            kept.append(line)
    return kept
