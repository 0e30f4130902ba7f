"""Redis Streams, read through a consumer group.

An entry has a field ``json`` with a JSON object, or with several of them, one a line; a field ``arrow`` with
an Arrow IPC stream of samples; or a field for each column, as text.

The checkpoint's position rules: the group is set to it at the start, and to the last entry read after Redis
was away, so that entries that were delivered, but are not in the model, are delivered again. Entries are
acknowledged once a checkpoint holds them, so those pending are what a crash would deliver again. Only one run
may read a group.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import pyarrow as pa

from rowhaul.data.schema import Schema
from rowhaul.data.sources.messages import (
    Decoded,
    Message,
    MessageDecoder,
    Texts,
    Unreadable,
    Where,
    join_decoded,
)
from rowhaul.data.sources.source import POLL_SECONDS, Chunk, Position
from rowhaul.errors import ConfigError, DataError

SCHEMES = ("redis", "rediss")
PASSWORD_VARIABLE = "REDISCLI_AUTH"  # as redis-cli calls it
DEFAULT_GROUP, _CONSUMER = "rowhaul", "trainer"
_JSON, _ARROW = b"json", b"arrow"
_FIRST_ENTRIES, _MOST_ENTRIES = 50, 1000  # asked for at a time
_CHUNK_SAMPLES = 4096  # about: a chunk is trained on while the next one is parsed
_GATHER_SECONDS = 0.05  # when all that came is read: parsing few samples at a time costs more for each
_ACKNOWLEDGED = 1000  # at a time
_MOST_PENDING = 1 << 20  # that are counted
_RETRY_SECONDS = 0.5
_SOCKET_SECONDS = 10.0
_BEGINNING = "0-0"
# Replies of a server that may do it later, or is no longer the one to ask: codes, or the client's names.
_NOT_NOW = {"NOREPLICAS", "MISCONF", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "OOM"}
_NOT_NOW |= {"ReadOnlyError", "MasterDownError", "ClusterDownError", "OutOfMemoryError"}


Entries = Sequence[tuple[bytes, Mapping[bytes, bytes]]]
Place = tuple[str, str, int, int]
"""Where a sample is: the entry before, its entry, its number there from 1, samples there."""


class RedisSource:
    """Reads ``redis://[user:password@]host[:port]/[database/]stream[?group=name]``; see `Source`.

    A password that is not in the address is that of the environment, `PASSWORD_VARIABLE`.
    """

    patience = 100

    def __init__(self, url: str, schema: Schema, kinds: dict[str, str]) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ConfigError("redis:// needs a client: pip install 'rowhaul[redis]'") from None
        self._away = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
        self._refused = redis.exceptions.ResponseError
        self._unauthorized = redis.exceptions.AuthenticationError  # one of those that say it is away
        address, port = _parts(url)
        database, _, stream = unquote(address.path.strip("/")).rpartition("/")
        if not address.hostname or not stream or (database and not database.isdecimal()):
            raise ConfigError(
                f"{shown(url)}: expected redis://host[:port]/stream, or redis://host/database/stream"
            )
        options = parse_qs(address.query)
        if unknown := sorted(set(options) - {"group"}):
            raise ConfigError(f"{shown(url)}: {unknown[0]!r} is not an option; known is group")
        self._stream, self._group = stream, options.get("group", [DEFAULT_GROUP])[0]
        self.name = f"{address.scheme}://{address.hostname}:{port}/{address.path.strip('/')}"
        password = unquote(address.password) if address.password else os.environ.get(PASSWORD_VARIABLE)
        self.kinds, self.notes = dict(kinds), deque[str]()
        self._decoder = MessageDecoder(schema, self.kinds)
        self._saved = _BEGINNING  # up to here entries may be acknowledged
        self._delivered: deque[str] = deque()  # and not acknowledged yet
        self._server: Any = redis.Redis(
            host=address.hostname,
            port=port,
            db=int(database or 0),
            username=unquote(address.username) if address.username else None,
            password=password or None,
            ssl=address.scheme == "rediss",
            socket_timeout=_SOCKET_SECONDS,
            socket_connect_timeout=_SOCKET_SECONDS,
            # A read whose answer was lost has delivered its entries: asking again would leave them out.
            retry=Retry(NoBackoff(), 0),
        )

    def read(self, position: Position | None) -> Iterator[Chunk | None]:
        """Yield entries as they come; while Redis is away, wait for it."""
        last, skip = (position["id"], position["lines"]) if position else (_BEGINNING, 0)
        begun = position.get("entry") if position else None  # earlier versions did not name it
        self._saved = last
        is_joined, is_away, was_joined, count = False, False, False, _FIRST_ENTRIES
        while True:
            try:
                if not is_joined:
                    self._join(last)
                    is_joined = was_joined = True
                self._acknowledge()
                wait = int(POLL_SECONDS * 1000)
                read = self._server.xreadgroup(self._group, _CONSUMER, {self._stream: ">"}, count, wait)
            except (*self._away, self._refused) as error:
                if "NOGROUP" in str(error):  # the stream or its group was removed: begin it anew
                    is_joined = False
                    yield None
                    continue
                if not self._is_away(error):
                    raise DataError(f"{self.name}: {error}") from None
                if isinstance(error, self._unauthorized) and not was_joined:
                    raise ConfigError(
                        f"{self.name} does not let this user and password in ({error}); give them in the "
                        f"address (redis://user:password@host/stream), or the password in "
                        f"{PASSWORD_VARIABLE}, also where a run resumes: it keeps no password"
                    ) from None
                if not is_away:
                    self.notes.append(f"{self.name} is away ({error}); waiting for it")
                is_joined, is_away = False, True
                self._server.connection_pool.disconnect()  # another server may have the name now
                time.sleep(_RETRY_SECONDS)
                yield None
                continue
            if is_away:
                self.notes.append(f"{self.name} is back")
                is_away = False
            entries = read[0][1] if read else []
            if not entries:
                yield None
                continue
            if skip and begun and entries[0][0].decode() != begun:
                self.notes.append(
                    f"{self.name}: entry {begun} was removed from the stream when {skip:,} of its samples "
                    "were learned: the others are lost"
                )
                skip = 0
            chunk = self._chunk(last, skip, entries)
            yield chunk
            last, skip = entries[-1][0].decode(), 0
            if len(entries) < count:
                time.sleep(_GATHER_SECONDS)
            count = max(1, min(_MOST_ENTRIES, _CHUNK_SAMPLES * len(entries) // max(len(chunk.block), 1)))

    def event_time(self, position: Position) -> float | None:
        """Return the time in an entry's id: when it was added, unless its producer chose another one."""
        return _number(position["id"])[0] / 1000  # 0 within the first entry

    def saved(self, position: Position) -> None:
        """Acknowledge what a checkpoint holds, when the reading thread comes round to it."""
        self._saved = position["id"]

    def close(self) -> None:
        """Acknowledge what is saved, if Redis is there, and disconnect."""
        try:
            self._acknowledge()
            self._server.close()
        except (*self._away, self._refused):
            pass  # done at the next start

    def _is_away(self, error: Exception) -> bool:
        """Whether it is to be waited for, as after a failover."""
        reply = {type(error).__name__, str(error).partition(" ")[0]}
        return isinstance(error, self._away) or not _NOT_NOW.isdisjoint(reply)

    def _join(self, last: str) -> None:
        """Deliver everything after an entry, again where it was delivered before."""
        num_read = None
        try:
            self._server.xgroup_create(self._stream, self._group, id=last, mkstream=True)
        except self._refused as error:
            if "BUSYGROUP" not in str(error):
                raise
            num_read = self._num_read(last)
            self._server.xgroup_setid(self._stream, self._group, last, entries_read=num_read)
            self._acknowledge_before()
        if last != _BEGINNING:
            self._tell_of_removed(last, num_read)

    def _num_read(self, last: str) -> int | None:
        """Count the entries that the stream ever had up to one that was read; None: Redis does not know."""
        groups = self._server.xinfo_groups(self._stream)
        read = next((one.get("entries-read") for one in groups if one["name"].decode() == self._group), None)
        if read is None:
            return None
        after = self._server.xpending_range(
            self._stream, self._group, min=f"({last}", max="+", count=_MOST_PENDING
        )
        return max(0, int(read) - len(after))

    def _tell_of_removed(self, last: str, num_read: int | None) -> None:
        """Say so where entries after the last one that was read may have been removed from the stream."""
        about = self._server.xinfo_stream(self._stream)
        deleted, first = about.get("max-deleted-entry-id", _BEGINNING.encode()).decode(), about["first-entry"]
        oldest = (first[0] if first else about["last-generated-id"]).decode()
        if _number(deleted) > _number(last):
            what = f"entries up to {deleted}"
        elif _number(oldest) <= _number(last):
            return
        else:  # trimmed; how far, only counts can tell, and those only where no entry was deleted by itself
            num_gone = about.get("entries-added", 0) - about["length"]
            if deleted == _BEGINNING and num_read is not None and num_gone <= num_read:
                return
            what = f"entries before {oldest}" if first else "all entries"
        self.notes.append(
            f"{self.name}: {what} were removed from the stream, but the model has learned up to {last} only: "
            "some may be lost"
        )

    def _acknowledge_before(self) -> None:
        """Acknowledge what was saved, but not acknowledged before a crash."""
        while True:
            pending = self._server.xpending_range(
                self._stream, self._group, min="-", max=self._saved, count=_ACKNOWLEDGED
            )
            if not pending:
                return
            self._server.xack(self._stream, self._group, *(one["message_id"] for one in pending))

    def _acknowledge(self) -> None:
        saved = _number(self._saved)
        while self._delivered and _number(self._delivered[0]) <= saved:
            first = [self._delivered[place] for place in range(min(_ACKNOWLEDGED, len(self._delivered)))]
            done = [one for one in first if _number(one) <= saved]
            self._server.xack(self._stream, self._group, *done)
            for _ in done:
                self._delivered.popleft()

    def _chunk(self, last: str, skip: int, entries: Entries) -> Chunk:
        """Decode entries; the first ``skip`` samples of the first one are in the model already."""
        self._delivered.extend(id_bytes.decode() for id_bytes, _ in entries)
        samples: list[pa.Table | Sequence[Message]] = []
        origins: list[Place] = []
        for number, (id_bytes, fields) in enumerate(entries):
            entry, found = id_bytes.decode(), self._samples(fields)
            first = skip if number == 0 else 0
            samples.append(found.slice(first) if isinstance(found, pa.Table) else found[first:])
            origins += [(last, entry, line + 1, len(found)) for line in range(first, len(found))]
            last = entry
        decoded = self._decoded(samples, lambda place: f"entry {origins[place][1]}")
        return Chunk(decoded.block, partial(_after, origins, decoded.places), decoded.set_aside)

    def _decoded(self, samples: Sequence[pa.Table | Sequence[Message]], where: Where) -> Decoded:
        """Decode the samples of entries, those that are alike and follow each other at once."""
        parts: list[Decoded] = []
        first = 0
        for schema, alike in groupby(samples, lambda one: getattr(one, "schema", None)):
            named = partial(_named, where, first)
            if schema is None:
                parts.append(self._decoder.decode(list(chain.from_iterable(alike)), named))
            else:
                parts.append(self._decoder.decode_table(pa.concat_tables(alike), named))
            first += parts[-1].num_messages
        return join_decoded(parts)

    def _samples(self, fields: Mapping[bytes, bytes]) -> pa.Table | Sequence[Message]:
        """Return the samples of an entry."""
        if _JSON in fields:
            return fields[_JSON].strip().split(b"\n")
        if _ARROW not in fields:
            return [Texts(fields)]
        try:
            return _table(fields[_ARROW])
        except (pa.ArrowException, ValueError, OSError) as error:  # OSError: it ends too early
            return [Unreadable(f"its field arrow is no Arrow stream: {error}")]


def without_password(address: str) -> str:
    """Return the address of a stream as a run may keep it; other data as they are."""
    scheme, _, rest = address.partition("://")
    if scheme not in SCHEMES:
        return address
    place = re.split("[/?#]", rest, maxsplit=1)[0]
    user, _, host = place.rpartition("@")
    name = user.partition(":")[0]
    return f"{scheme}://{name}{'@' if name else ''}{host}{rest[len(place) :]}"


def shown(address: str) -> str:
    """Return an address for messages, which need not be right: a password may have any character in it."""
    return re.sub(r"(?<=://)([^:]*):.*@", r"\1:***@", address, flags=re.DOTALL)


def _parts(url: str) -> tuple[SplitResult, int]:
    """Split an address, and return its port; what is wrong with it must not show the password."""
    try:
        address = urlsplit(url)
        return address, address.port or 6379
    except ValueError:
        raise ConfigError(
            f"{shown(url)}: the host or its port cannot be read; in a password / # ? @ are written %2F %23 "
            "%3F %40"
        ) from None


def _table(data: bytes) -> pa.Table:
    """Read an Arrow stream; raises what Arrow does where it is none."""
    with pa.ipc.open_stream(data) as stream:
        table = stream.read_all()
    table.validate(full=True)  # offsets that point elsewhere would be followed
    return table


def _number(entry: str) -> tuple[int, int]:
    """An entry's id as numbers, which compare."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


def _named(where: Where, first: int, place: int) -> str:
    return where(first + place)


def _after(origins: list[Place], places: Sequence[int], count: int) -> Position:
    before, entry, line, lines = origins[places[count - 1]]
    return {"id": entry, "lines": 0} if line == lines else {"id": before, "lines": line, "entry": entry}
