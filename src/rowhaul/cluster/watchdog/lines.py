"""Messages between watchdogs, and between a watchdog and its rank: JSON, one message a line."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

_MOST_BYTES = 1 << 20  # of a message, and of what may wait to be sent


class Lines:
    """Messages over a connected socket that never block; after an error it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_closed = False
        self._received, self._to_send = bytearray(), bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be sent: the other end reads slowly, or not at all just now."""
        return bool(self._to_send)

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self.connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the socket takes it."""
        self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what waits; return whether nothing does any more."""
        try:
            while self._to_send and not self.is_closed:
                del self._to_send[: self.connection.send(self._to_send)]
        except (BlockingIOError, InterruptedError):
            if len(self._to_send) > _MOST_BYTES:
                self.is_closed = True  # nobody reads
        except OSError:
            self.is_closed = True
        return not self._to_send or self.is_closed

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; of very many some are left for the next call."""
        lines: list[bytearray] = []
        num_read = 0
        try:
            while num_read < 2 * _MOST_BYTES:
                part = self.connection.recv(1 << 16)
                if not part:
                    self.is_closed = True
                    break
                num_read += len(part)
                *whole, self._received = (self._received + part).split(b"\n")
                lines += whole
                if len(self._received) > 2 * _MOST_BYTES:
                    raise ConnectionError("the message is too long")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_closed = True
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # nested too deep
            messages = [None]
        if not all(isinstance(one, dict) for one in messages):
            self.is_closed = True
            return []
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.is_closed = True
        self.connection.close()
