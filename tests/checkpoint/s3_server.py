"""An S3 server on this machine, and a proxy before it that can cut connections or refuse."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from rowhaul._ports import free_port

DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class S3Server:
    """Moto's server as a process of its own, reached through a proxy."""

    def __init__(self):
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.proxy = Proxy(port)
        self.url = f"http://127.0.0.1:{self.proxy.port}"
        until = time.monotonic() + 100
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.1)

    def close(self):
        self.proxy.close()
        self._process.kill()
        self._process.wait()


class Proxy:
    """Passes connections on to a port; from ``cut_after`` bytes of uploads on, it cuts them all.

    While ``denies`` is set, every request is answered with 403.
    """

    def __init__(self, target):
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut_after = None
        self.denies = False
        self.num_cut = self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client):
        with client, suppress(OSError):
            if self.denies:
                body = b"" if client.recv(1 << 16).startswith(b"HEAD") else DENIED
                head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(DENIED)}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode() + body)
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                while self._pass_on(client, server):
                    pass

    def _pass_on(self, client, server):
        for ready in select.select([client, server], [], [], 60)[0]:
            data = ready.recv(1 << 16)
            if not data or self.denies:
                return False
            if ready is client:
                self.num_bytes += len(data)
                if self.cut_after is not None and self.num_bytes > self.cut_after:
                    self.num_cut += 1
                    return False
            (server if ready is client else client).sendall(data)
        return True
