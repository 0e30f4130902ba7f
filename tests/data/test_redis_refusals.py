"""A Redis server that refuses for now is waited for; its replies are enough to see that."""

import socket
import threading
from contextlib import closing
from itertools import islice

import pytest

from rowhaul.data.schema import Schema
from rowhaul.data.sources import redis_stream
from rowhaul.data.sources.redis_stream import RedisSource
from rowhaul.errors import DataError

pytest.importorskip("redis")
SCHEMA = Schema.from_dict({"label": "click", "ids": ["user"]})
READ_ONLY = b"-READONLY You can't write against a read only replica."
NOT_NOW = [
    READ_ONLY,
    b"-NOREPLICAS Not enough good replicas to write.",
    b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    b"-OOM command not allowed when used memory > 'maxmemory'.",
    b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
]


class Replies:
    """Answers commands on streams with these replies, in order, to any client."""

    def __init__(self, replies):
        self._replies, self.num_connections = iter(replies), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.num_connections += 1
            with connection, connection.makefile("rwb") as file:
                while first := file.readline():
                    words = [file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(first[1:]))]
                    is_hello, is_asked = words[0] == b"HELLO", words[0].startswith(b"X")
                    reply = b"%1\r\n+proto\r\n:3" if is_hello else next(self._replies) if is_asked else b"+OK"
                    file.write(reply + b"\r\n")
                    file.flush()

    def close(self):
        self._listener.close()


def test_a_server_that_refuses_for_now_is_waited_for(monkeypatch):
    monkeypatch.setattr(redis_stream, "_RETRY_SECONDS", 0.0)
    joined, nothing = b"+OK", b"*0"
    replies = [*NOT_NOW, joined, READ_ONLY, joined, nothing, nothing, b"-WRONGTYPE Operation against a key"]
    with closing(Replies(replies)) as server:
        source = RedisSource(f"redis://127.0.0.1:{server.port}/clicks", SCHEMA, {})
        chunks = source.read(None)
        assert list(islice(chunks, 8)) == [None] * 8
        away, back = source.notes
        assert "is away (You can't write against a read only replica.); waiting for it" in away
        assert "is back" in back
        assert server.num_connections == 7  # the name may lead to another server
        with pytest.raises(DataError, match="WRONGTYPE"):
            next(chunks)
        source.close()
