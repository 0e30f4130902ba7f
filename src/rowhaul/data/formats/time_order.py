"""Sorts rows by time in bounded memory: an external merge sort.

Some logs are grouped by user or by ad; their last rows would be a poor test set. Rows are sorted in runs that
fit in memory, each run is written to a scratch file, and the runs are merged one slice of time after another.
Rows of the same time keep their order in the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.folder.files import writing
from rowhaul.data.folder.writer import Chunk
from rowhaul.data.formats.source import TextSource
from rowhaul.data.text.reader import BadLines

ROWS_PER_RUN = 1 << 19
ROWS_PER_SLICE = 1 << 16
_SAMPLE_EVERY = 64


@dataclass(frozen=True)
class TimeOrdered:
    """``source`` sorted by its time column, which the chunks then lack unless ``keeps_time``.

    A resumed command sorts again and skips the rows already written.
    """

    source: TextSource
    scratch: Path
    keeps_time: bool = False

    def chunks(self, position: dict[str, Any] | None, bad_lines: BadLines, seed: int = 0) -> Iterator[Chunk]:
        """See `Source`. Empty chunks while the input is read, the first half of the work."""
        done = position["rows"] if position else 0
        bad_lines.count, bad_lines.examples = 0, []  # the whole input is read again
        shutil.rmtree(self.scratch, ignore_errors=True)
        with writing(self.scratch.parent):
            self.scratch.mkdir(parents=True)
        runs: list[_Run] = []
        waiting: list[pa.RecordBatch] = []
        for chunk in self.source.chunks(None, bad_lines, seed):
            waiting.append(chunk.batch)
            if sum(batch.num_rows for batch in waiting) >= ROWS_PER_RUN:
                runs.append(self._write_run(len(runs), waiting))
                waiting = []
            yield Chunk(self._as_told(chunk.batch.slice(0, 0)), {"rows": done}, chunk.share / 2)
        if waiting:
            runs.append(self._write_run(len(runs), waiting))
        total = sum(len(run.times) for run in runs)
        rows = 0
        for table in _merge(runs):
            for sorted_rows in table.combine_chunks().to_batches():
                batch = self._as_told(sorted_rows)
                rows += batch.num_rows
                fresh = batch.slice(max(0, batch.num_rows - max(0, rows - done)))
                yield Chunk(fresh, {"rows": max(rows, done), **bad_lines.to_dict()}, 0.5 + rows / total / 2)

    def _as_told(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if self.keeps_time else batch.drop_columns([self.time])

    @property
    def time(self) -> str:
        """The name of the time column."""
        assert self.source.time_column is not None
        return self.source.time_column

    def _write_run(self, number: int, batches: list[pa.RecordBatch]) -> _Run:
        table = pa.Table.from_batches(batches)
        times = table[self.time].to_numpy()
        order = np.argsort(times, kind="stable")
        times = times[order]
        path = self.scratch / f"run-{number:05d}.arrow"
        with writing(self.scratch.parent), pa.OSFile(str(path), "wb") as file:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table.take(pa.array(order)), max_chunksize=ROWS_PER_SLICE)
            np.save(path.with_suffix(".npy"), times)
        mapped = np.load(path.with_suffix(".npy"), mmap_mode="r")
        rows = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return _Run(rows, mapped, times[::_SAMPLE_EVERY].copy())


@dataclass(frozen=True)
class _Run:
    """Sorted rows and their times, both mapped from disk, and some of the times in memory."""

    rows: pa.Table
    times: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]


def _merge(runs: list[_Run]) -> Iterator[pa.Table]:
    """Tables of about `ROWS_PER_SLICE` rows, all rows of one time in the same table."""
    if not runs:
        return
    samples = np.sort(np.concatenate([run.sample for run in runs]))
    bounds = np.unique(samples[:: ROWS_PER_SLICE // _SAMPLE_EVERY])[1:]
    ends = [[*np.searchsorted(run.times, bounds), len(run.times)] for run in runs]
    starts = [0] * len(runs)
    for one_slice in range(len(bounds) + 1):
        stops = [end[one_slice] for end in ends]
        parts = [
            run.rows.slice(start, stop - start) for run, start, stop in zip(runs, starts, stops, strict=True)
        ]
        times = [run.times[start:stop] for run, start, stop in zip(runs, starts, stops, strict=True)]
        order = np.argsort(np.concatenate(times), kind="stable")
        yield pa.concat_tables(parts).take(pa.array(order))
        starts = stops
