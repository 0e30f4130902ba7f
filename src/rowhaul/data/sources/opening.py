"""Which data are a stream, its schema, and the source that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rowhaul.data.files import schema_beside
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.data.sources.folder import FolderSource
from rowhaul.data.sources.lines import STANDARD_INPUT, LinesSource
from rowhaul.data.sources.redis_stream import SCHEMES, RedisSource, shown
from rowhaul.data.sources.source import Source
from rowhaul.errors import ConfigError, DataError


def is_address(given: str) -> bool:
    """Whether something names a stream that is no folder."""
    return given == STANDARD_INPUT or given.partition("://")[0] in SCHEMES


def stream_of(data: Any, follow: bool) -> str | None:
    """Return what to read as a stream; None: the data are files."""
    items = [str(one) for one in ([data] if isinstance(data, str | Path) else data or ())]
    streams = [one for one in items if is_address(one)]
    if not streams and not follow:
        return None
    if len(items) != 1:
        raise ConfigError(
            f"a stream is read by itself, but {len(items)} data were given: "
            f"{', '.join(map(shown, items)) or 'none'}; "
            "give one folder to follow (--follow), - for standard input, or one redis:// address"
        )
    return items[0]


def find_stream_schema(given: str) -> Schema:
    """The schema in or above a folder that is followed; other streams need one to be named."""
    folder = Path(given).expanduser()
    found = None if is_address(given) else schema_beside(folder)
    if found is None:
        where = "" if is_address(given) else f"no {SCHEMA_FILE} in {folder} or in the folder above it; "
        raise DataError(f"{where}a stream needs a schema: name one (--schema), or --features a,b --label y")
    return Schema.read(found)


def open_source(given: str, schema: Schema, kinds: dict[str, str]) -> Source:
    """Open a stream; ``kinds`` are those of the ids trained on before."""
    if given == STANDARD_INPUT:
        return LinesSource(schema, kinds)
    if is_address(given):
        return RedisSource(given, schema, kinds)
    return FolderSource(given, schema, kinds)
