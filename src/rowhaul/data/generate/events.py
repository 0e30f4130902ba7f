"""Generated click events that appear in a folder, so many a second."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rowhaul.data.generate.generator import LogGenerator
from rowhaul.data.schema import SCHEMA_FILE

_ENDLESS = 1 << 36  # rows
_KEPT_FILES = 120  # that a trainer may be behind
_CANDIDATES = 100


class Events:
    """Writes a file of events a second; use as a context.

    Args:
        folder: where files appear.
        per_second: events.
        seed: of the log.
    """

    def __init__(self, folder: Path, per_second: int, seed: int) -> None:
        self._folder, self._per_second = folder, per_second
        self._generator = LogGenerator("criteo", _ENDLESS, seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="rowhaul-events")
        self._latest: pa.Table | None = None
        self.error: BaseException | None = None
        self.num_written = 0
        folder.mkdir(parents=True)
        self._generator.schema.write(folder / SCHEMA_FILE)

    def __enter__(self) -> Events:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def request(self) -> dict[str, Any] | None:
        """Return a request that asks for the scores of some of the newest events, without their labels."""
        table, schema = self._latest, self._generator.schema
        if table is None or schema.label is None:
            return None
        columns = table.slice(0, _CANDIDATES).drop_columns([schema.label.name]).to_pydict()
        return {"shared": {}, "candidates": columns}

    def _write(self) -> None:
        try:
            self._write_all()
        except BaseException as error:  # the main thread asks
            self.error = error

    def _write_all(self) -> None:
        waiting, batches = pa.Table.from_batches([], self._schema()), self._generator.batches()
        written: deque[Path] = deque()
        began, number = time.monotonic(), 0
        while not self._ended.wait(max(0.0, began + number - time.monotonic())):
            while len(waiting) < self._per_second:
                waiting = pa.concat_tables([waiting, pa.Table.from_batches([next(batches)])])
            self._latest, waiting = waiting.slice(0, self._per_second), waiting.slice(self._per_second)
            path = self._folder / f"events-{number}.parquet"
            pq.write_table(self._latest, path.with_name(f".{path.name}"))
            os.rename(path.with_name(f".{path.name}"), path)  # seen only when it is whole
            self.num_written += self._per_second
            written.append(path)
            if len(written) > _KEPT_FILES:
                written.popleft().unlink()
            number += 1

    def _schema(self) -> pa.Schema:
        return next(LogGenerator("criteo", 1, self._generator.seed).batches()).schema
