"""Connects to ports where it was not invited: ``python testbed/chaos/stranger.py SECONDS ADDRESS:PORT ...``

Sends what a port scanner, a browser or a confused program sends, and keeps some connections open in silence.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time

GREETINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    os.urandom(64),
    struct.pack("<Q", 2**62),
    b"\0" * 4096,
)


def main() -> None:
    """Knock at every port with every greeting; stay for a while, then leave without a word."""
    seconds, *targets = sys.argv[1:]
    with contextlib.ExitStack() as stack:
        for target in targets:
            address, _, port = target.rpartition(":")
            for greeting in GREETINGS:
                with contextlib.suppress(OSError):
                    knocking = stack.enter_context(socket.create_connection((address, int(port)), 1.0))
                    knocking.sendall(greeting)
        time.sleep(float(seconds))


if __name__ == "__main__":
    main()
