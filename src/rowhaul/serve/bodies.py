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
from rowhaul.serve.plain_arrow import PackedError, num_plain_values
from rowhaul.serve.requests import Candidates, RequestError, Shared
from rowhaul.serve.scorer import Scored
from rowhaul.serve.settings import ServeSettings

ARROW, JSON = "application/vnd.apache.arrow.stream", "application/json"
_SHARED = b"shared"


class BodyError(RowhaulError):
    """A body that is neither JSON nor Arrow, or not what a request looks like."""


class TooLargeError(RequestError):
    """A request for more than is allowed."""


def parse(body: bytes, content_type: str, limits: ServeSettings) -> tuple[Shared, Candidates]:
    """Return shared features and candidates; without Arrow's type, a body is taken for JSON.

    Raises:
        BodyError: the body is not what it is said to be.
        TooLargeError: it asks for more than ``limits`` allow.
        RequestError: something in it is wrong.
    """
    if content_type.partition(";")[0].strip().lower() == ARROW:
        return _parse_arrow(body, limits)
    shared, candidates = _parse_json(body)
    _check_count(_num_candidates(candidates), limits)
    return shared, candidates


def _parse_json(body: bytes) -> tuple[Shared, Candidates]:
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


def _parse_arrow(body: bytes, limits: ServeSettings) -> tuple[Shared, Candidates]:
    try:
        messages = list(pa.ipc.MessageReader.open_stream(body))
        _check_values(sum(map(num_plain_values, messages)), limits)
        candidates = _candidates_of(messages)  # nothing is copied: columns are where they lie in the body
        _check_count(candidates.num_rows, limits)
        candidates.validate(full=True)  # offsets that point elsewhere would be followed
    except (BodyError, TooLargeError):
        raise
    except PackedError as error:
        raise BodyError(f"the body is an Arrow stream that cannot be taken: {error}") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BodyError(f"the body is no Arrow stream: {error}") from None
    return _shared_of(candidates.schema), candidates


def _candidates_of(messages: Sequence[pa.Message]) -> pa.RecordBatch | pa.Table:
    """Decode messages that were found to be plain; the columns of a single batch are in one piece."""
    kinds = [one.type for one in messages]
    if kinds[:1] != ["schema"] or set(kinds[1:]) - {"record batch"}:  # Arrow takes any first one for a schema
        raise BodyError("the body is no Arrow stream: it has to be a schema, and record batches after it")
    schema = pa.ipc.read_schema(messages[0])
    schema.names  # noqa: B018  # raises where one is no text
    batches = [pa.ipc.read_record_batch(one, schema) for one in messages[1:]]
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches, schema)


def _check_values(count: int, limits: ServeSettings) -> None:
    """Refuse more values than a body could have if each took a byte; nulls take none."""
    if count > (most := limits.max_body_bytes):
        reason = f"{count:,} values, those in lists included, and {most:,} are allowed, a byte each"
        raise TooLargeError("candidates", reason)


def _check_count(count: int, limits: ServeSettings) -> None:
    if count > limits.max_candidates:
        reason = f"{count:,} candidates, and {limits.max_candidates:,} are allowed in a request"
        raise TooLargeError("candidates", reason)


def _shared_of(schema: pa.Schema) -> Any:
    try:
        return json.loads((schema.metadata or {}).get(_SHARED, b"{}"))
    except (ValueError, RecursionError) as error:
        raise RequestError("shared", f"the schema's metadata has no JSON there: {error}") from None


def _num_candidates(candidates: Any) -> int:
    """Count candidates, as far as they can be; what cannot be counted is refused later."""
    if isinstance(candidates, dict):
        return max((len(one) for one in candidates.values() if isinstance(one, list)), default=0)
    return len(candidates) if isinstance(candidates, list) else 0


def answer(scored: Scored, accept: str) -> tuple[bytes, str]:
    """Return the body of an answer and its type: Arrow where it is asked for; of several labels, by name."""
    tasks = scored.tasks
    by_task = dict(zip(tasks, scored.scores.reshape(-1, len(tasks)).T, strict=True)) if tasks else {}
    if ARROW in accept:
        columns = {f"score_{task}": scores for task, scores in by_task.items()} or {"score": scored.scores}
        table = pa.table(columns).replace_schema_metadata({"step": str(scored.step)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return sink.getvalue().to_pybytes(), ARROW
    scores: Any = {task: one.tolist() for task, one in by_task.items()} or scored.scores.tolist()
    return json.dumps({"scores": scores, "step": scored.step}).encode(), JSON
