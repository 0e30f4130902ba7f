"""Rows in Redis, for those who serve from it: a key for each row, its vector as the value.

``rowhaul:TABLE:KEY`` holds the values of a row, little-endian numbers of the type that rows are computed in;
``rowhaul:about`` is JSON that says so, with the row size of each table, and is written last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter, Progress
from rowhaul.data.sources.redis_stream import shown
from rowhaul.errors import CheckpointError, ConfigError, StorageError
from rowhaul.export.export import chosen_tables

PREFIX = "rowhaul:"
_ABOUT = f"{PREFIX}about"
_BLOCK_ROWS = 5_000  # sent, and read back, at a time
_SECONDS = 10.0  # without an answer


@dataclass(frozen=True)
class RedisExport:
    """What an export made."""

    tables: tuple[str, ...]
    num_rows: int
    prefix: str = PREFIX


def export_to_redis(
    reader: CheckpointReader,
    url: str,
    *,
    tables: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> RedisExport:
    """Write the rows of a checkpoint to Redis as whole vectors; each is read back and compared.

    Raises:
        ConfigError: the package is missing, a table is not known, its rows are shared by ids, or there is an
            export already.
        StorageError: Redis cannot be reached, or fails.
        CheckpointError: rows read back otherwise.
    """
    if find_spec("redis") is None:
        raise ConfigError("rows to Redis need its client: pip install 'rowhaul[redis]'")
    import redis

    chosen = chosen_tables(reader, tables)
    for name in chosen:
        if not reader.format(name).keyed_by_id:
            raise ConfigError(
                f"rows of table {name!r} have a budget and are shared by ids: there is no row for every id "
                "to be found by its key; export a folder to serve from (--dense)"
            )
    count = Counter(sum(reader.tables[name].num_rows for name in chosen), progress)
    try:
        with redis.Redis.from_url(url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS) as client:
            if client.exists(_ABOUT):
                raise ConfigError(
                    f"{shown(url)} has an export already ({_ABOUT}); choose another database, or empty "
                    "this one (redis-cli FLUSHDB)"
                )
            num_rows = sum(_write_table(client, reader, name, count) for name in chosen)
            client.set(_ABOUT, json.dumps(_about(reader, chosen)))
    except (redis.RedisError, ValueError, OSError) as error:
        if isinstance(error, ConfigError | CheckpointError):
            raise
        raise StorageError(f"{shown(url)}: Redis cannot be written: {error}") from None
    return RedisExport(tuple(chosen), num_rows)


def _write_table(client: Any, reader: CheckpointReader, table: str, count: Counter) -> int:
    dim, num_rows = reader.tables[table].dim, 0
    for keys, records in reader.rows(table):
        for first in range(0, len(keys), _BLOCK_ROWS):
            some = slice(first, first + _BLOCK_ROWS)
            names = [f"{PREFIX}{table}:{key}" for key in keys[some].tolist()]
            values = [one.tobytes() for one in np.ascontiguousarray(records[some, :dim])]
            client.mset(dict(zip(names, values, strict=True)))
            if client.mget(names) != values:
                raise CheckpointError(f"rows of table {table!r} read back from Redis otherwise; try again")
            count.add(len(names))
            num_rows += len(names)
    return num_rows


def _about(reader: CheckpointReader, tables: Sequence[str]) -> dict[str, Any]:
    return {
        "format": "rowhaul-redis",
        "version": 1,
        "step": reader.facts.get("step"),
        "keys": f"{PREFIX}TABLE:KEY",
        "reading": "numpy.frombuffer(value, dtype)",
        "tables": {
            name: {"dim": reader.tables[name].dim, "dtype": reader.tables[name].dtype} for name in tables
        },
    }
