"""Bodies of requests and answers: JSON, or Arrow's IPC stream.

In Arrow the candidates are the rows of a table, and shared features are JSON in the metadata of its schema,
under ``shared``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rowhaul.errors import RowhaulError
from rowhaul.serve.requests import Candidates, RequestError, Shared
from rowhaul.serve.scorer import Scored

ARROW, JSON = "application/vnd.apache.arrow.stream", "application/json"
_SHARED = b"shared"


class BodyError(RowhaulError):
    """A body that is neither JSON nor Arrow, or not what a request looks like."""


def parse(body: bytes, content_type: str) -> tuple[Shared, Candidates]:
    """Return shared features and candidates; without Arrow's type, a body is taken for JSON."""
    if content_type.partition(";")[0].strip().lower() == ARROW:
        return _parse_arrow(body)
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise BodyError('the body must be a mapping: {"shared": {...}, "candidates": [...]}')
    if "candidates" not in given:
        raise RequestError("candidates", "it is missing; give a mapping for each candidate")
    if unknown := sorted(given.keys() - {"shared", "candidates"}):
        raise RequestError(unknown[0], "only shared and candidates are known here")
    return given.get("shared", {}), given["candidates"]


def _parse_arrow(body: bytes) -> tuple[Shared, Candidates]:
    try:
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
        table.validate(full=True)  # offsets that point elsewhere would be followed
        batches = table.to_batches()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BodyError(f"the body is no Arrow stream: {error}") from None
    # The columns of one batch are in one piece.
    return _shared_of(table), batches[0] if len(batches) == 1 else table


def _shared_of(table: pa.Table) -> Any:
    try:
        return json.loads((table.schema.metadata or {}).get(_SHARED, b"{}"))
    except ValueError as error:
        raise RequestError("shared", f"the schema's metadata has no JSON there: {error}") from None


def num_candidates(candidates: Any) -> int:
    """Count candidates, as far as they can be; what cannot be counted is refused later."""
    if isinstance(candidates, pa.Table | pa.RecordBatch):
        return int(candidates.num_rows)
    if isinstance(candidates, dict):
        return max((len(one) for one in candidates.values() if isinstance(one, list)), default=0)
    return len(candidates) if isinstance(candidates, list) else 0


def answer(scored: Scored, accept: str, tasks: Sequence[str] = ()) -> tuple[bytes, str]:
    """Return the body of an answer and its type: Arrow where it is asked for; of several labels, by name."""
    by_task = dict(zip(tasks, scored.scores.reshape(len(scored.scores), -1).T, strict=True)) if tasks else {}
    if ARROW in accept:
        columns = {f"score_{task}": scores for task, scores in by_task.items()} or {"score": scored.scores}
        table = pa.table(columns).replace_schema_metadata({"step": str(scored.step)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes(), ARROW
    scores: Any = {task: one.tolist() for task, one in by_task.items()} or scored.scores.tolist()
    return json.dumps({"scores": scores, "step": scored.step}).encode(), JSON
