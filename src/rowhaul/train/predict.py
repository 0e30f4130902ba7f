"""Scores of a trained model as a Parquet file, streamed and visible only when whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rowhaul._files import whole
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError
from rowhaul.train.run import load_trained
from rowhaul.train.trainer import Progress

_SCORES = pa.schema([pa.field("score", pa.float32(), nullable=False)])


def predict_file(
    run: str | Path,
    data: Any,
    out: str | Path,
    *,
    batch_size: int = 8192,
    on_unknown: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> int:
    """Write one click probability per sample of ``data``, in its order; returns how many."""
    out = Path(out)
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists; choose another file, or say that it may be overwritten (--overwrite)")
    trainer = load_trained(run, on_unknown)
    stream = SampleStream(data, trainer.schema, batch_size, require_label=False)
    done = 0
    with whole(out) as temporary, pq.ParquetWriter(temporary, _SCORES) as writer:
        for _, logits in trainer.score(stream, progress):
            scores = torch.sigmoid(logits).to(torch.float32).numpy()
            writer.write_batch(pa.record_batch([pa.array(scores)], schema=_SCORES))
            done += len(scores)
    return done
