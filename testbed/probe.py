"""A program for either end of a link: sends and receives at the same time over one plain socket.

Prints how many bytes a second arrived, from the first piece to the last: the wait for the other end does
not count. It imports nothing but the standard library, so that many start at once on few cores.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PIECE_BYTES = 1 << 17
CONNECT_SECONDS = 20.0


def main(role: str, address: str, port: int, num_bytes: int, timeout_seconds: float) -> float:
    """Exchange as many bytes each way as ``role`` (listen, connect); returns bytes a second that arrived."""
    with _listen(address, port) if role == "listen" else _connect(address, port) as connection:
        connection.settimeout(timeout_seconds)
        sender = threading.Thread(target=_send, args=(connection, num_bytes), daemon=True)
        sender.start()
        rate = _receive(connection, num_bytes)
        sender.join(timeout_seconds)
        return rate


def _listen(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as server:
        server.settimeout(CONNECT_SECONDS)
        return server.accept()[0]


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:  # the other end is not there yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _send(connection: socket.socket, num_bytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    for begin in range(0, num_bytes, PIECE_BYTES):
        connection.sendall(piece[: num_bytes - begin])


def _receive(connection: socket.socket, num_bytes: int) -> float:
    buffer = bytearray(PIECE_BYTES)
    left = num_bytes - connection.recv_into(buffer)
    timed_bytes, begin = left, time.monotonic()
    while left > 0:
        received = connection.recv_into(buffer, min(left, PIECE_BYTES))
        if not received:
            raise ConnectionError(f"the other end left with {left} of {num_bytes} bytes to come")
        left -= received
    return timed_bytes / (time.monotonic() - begin)


if __name__ == "__main__":
    _, given_role, given_address, given_port, given_bytes, given_timeout = sys.argv
    print(main(given_role, given_address, int(given_port), int(given_bytes), float(given_timeout)))
