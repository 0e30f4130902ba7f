"""The rendezvous store: a small key-value server that ranks find each other through.

torch's `TCPStore` listens on all interfaces and answers anyone. This one listens where it is asked to, and
serves a connection only after its peer has proved the run's secret. Each connection has a thread, so that a
stranger who sends nothing keeps nobody waiting. It uses the standard library alone: the launcher hosts it
without loading PyTorch.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rowhaul._proof import demand
from rowhaul.errors import SecretError

PURPOSE = "store"  # of the proof
SET, GET, WAIT, CHECK, ADD, APPEND, COMPARE_SET, DELETE, COUNT = range(9)
DONE, TIMED_OUT = range(2)

_PROOF_SECONDS = 10.0
_MOST_UNPROVED = 256  # connections; the oldest makes way for the next
_MOST_MESSAGE_BYTES = 1 << 28
_FULL_REPORTS = 20  # refusals of a kind logged one by one; then only when their number doubles
_SIZE = struct.Struct("<I")

_log = logging.getLogger(__name__)


class StoreServer:
    """Serves until it is closed, in threads of its own.

    Args:
        listeners: bound and listening; the server closes them.
        secret: the run's secret; None: peers prove nothing.
    """

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes | None) -> None:
        self.addresses = tuple(str(one.getsockname()[0]) for one in listeners)
        self.port = int(listeners[0].getsockname()[1])
        self._listeners, self._secret = tuple(listeners), secret
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._lock = threading.Lock()  # of what follows
        self._unproved: dict[socket.socket, None] = {}  # oldest first
        self._proved: set[socket.socket] = set()
        self._num_refused: Counter[type[SecretError]] = Counter()  # scanners must not hide a wrong secret
        self._is_closed = False
        for listener in self._listeners:
            listener.settimeout(None)
            self._start(self._accept, listener)

    def close(self) -> None:
        """Stop listening and cut all connections."""
        with self._lock:
            self._is_closed = True
            connections = [*self._listeners, *self._unproved, *self._proved]
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for listener in self._listeners:
            listener.close()

    def _start(self, run: Callable[[socket.socket], None], one: socket.socket) -> None:
        threading.Thread(target=run, args=(one,), name="rowhaul-store", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, the peer has left already, or too many files are open
                time.sleep(0.1)
                continue
            with self._lock:
                if len(self._unproved) >= _MOST_UNPROVED:
                    with contextlib.suppress(OSError):
                        next(iter(self._unproved)).shutdown(socket.SHUT_RDWR)
                self._unproved[connection] = None
            try:
                self._start(self._serve, connection)
            except RuntimeError:  # the system has no thread to give now; the peer may try again
                with self._lock:
                    self._unproved.pop(connection, None)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._lets_in(connection):
                self._answer_all(connection)
        except (OSError, ValueError, IndexError):  # the peer has left, or sends nonsense
            pass
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
                self._proved.discard(connection)
            connection.close()

    def _lets_in(self, connection: socket.socket) -> bool:
        try:
            demand(connection, self._secret, _PROOF_SECONDS, PURPOSE)
        except SecretError as error:
            with self._lock:
                self._num_refused[type(error)] += 1
                count = self._num_refused[type(error)]
            if not self._is_closed and (count <= _FULL_REPORTS or count & (count - 1) == 0):
                _log.warning("the rendezvous store refused a connection (%d so far): %s", count, error)
            return False
        with self._lock:
            self._unproved.pop(connection, None)
            self._proved.add(connection)
        prepare(connection)
        return not self._is_closed

    def _answer_all(self, connection: socket.socket) -> None:
        while True:
            kind, *parts = receive_message(connection)
            send_message(connection, *self._answer(kind[0], parts))

    def _answer(self, kind: int, parts: list[bytes]) -> list[bytes]:
        """Return the status and the results of a request."""
        done = bytes([DONE])
        if kind in (GET, WAIT):
            seconds, *keys = parts
            with self._changed:
                if not self._changed.wait_for(lambda: self._has(keys), float(seconds)):
                    return [bytes([TIMED_OUT]), *(key for key in keys if key not in self._values)]
                return [done, *(self._values[key] for key in keys)] if kind == GET else [done]
        with self._changed:
            result = self._change(kind, parts)
            if kind not in (CHECK, COUNT, DELETE):  # these add nothing that others wait for
                self._changed.notify_all()
        return [done, *result]

    def _change(self, kind: int, parts: list[bytes]) -> list[bytes]:
        """Carry out a request that does not wait; return its results."""
        values = self._values
        if kind == SET:
            values.update(zip(parts[::2], parts[1::2], strict=True))
            return []
        if kind == CHECK:
            return [b"1" if self._has(parts) else b"0"]
        if kind == COUNT:
            return [b"%d" % len(values)]
        key, *rest = parts
        if kind == DELETE:
            return [b"1" if values.pop(key, None) is not None else b"0"]
        if kind == ADD:
            values[key] = b"%d" % (int(values.get(key, b"0")) + int(rest[0]))
        elif kind == APPEND:
            values[key] = values.get(key, b"") + rest[0]
        elif kind == COMPARE_SET:
            expected, desired = rest
            if key not in values and expected:
                return [expected]  # as torch's stores do
            if values.get(key, b"") == expected:
                values[key] = desired
        else:
            raise ValueError(f"unknown request {kind}")
        return [values[key]]

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)


def backlog(num_ranks: int) -> int:
    """Return how many connections a store's listener should queue.

    Strangers fill a short queue; ranks then get in only when TCP tries again, a second or more later.
    """
    return 4 * num_ranks + _MOST_UNPROVED


def prepare(connection: socket.socket) -> None:
    """Send small messages at once, and detect a host that is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send_message(connection: socket.socket, *parts: bytes) -> None:
    """Send some byte strings as one message."""
    body = b"".join(_SIZE.pack(len(part)) + part for part in parts)
    connection.sendall(_SIZE.pack(len(body)) + body)


def receive_message(connection: socket.socket) -> list[bytes]:
    """Receive the byte strings of one message."""
    (size,) = _SIZE.unpack(_receive(connection, _SIZE.size))
    if size > _MOST_MESSAGE_BYTES:
        raise ValueError(f"a message of {size:,} bytes")
    body, at, parts = _receive(connection, size), 0, []
    while at < size:
        (length,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size + length
        if at > size:
            raise ValueError("a part reaches beyond its message")
        parts.append(bytes(body[at - length : at]))
    return parts


def _receive(connection: socket.socket, size: int) -> bytearray:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the connection is closed")
        received += part
    return received
