"""A real redis-server for tests, on a free port, that can be killed and started again."""

import shutil
import signal
import subprocess
import time

import pytest

from rowhaul._ports import free_port


class RedisServer:
    """Keeps everything it has answered for: appendfsync always."""

    def __init__(self, folder):
        redis = pytest.importorskip("redis")
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        self._folder = folder
        self.client = redis.Redis(port=self.port, retry_on_error=[redis.exceptions.ConnectionError])
        self._process = None

    def start(self):
        """Start it, and wait until it answers."""
        options = ["--port", self.port, "--dir", self._folder, "--save", "", "--bind", "127.0.0.1"]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--logfile", "redis.log"]
        self._process = subprocess.Popen(["redis-server", *map(str, options)])
        end = time.monotonic() + 200
        while not self._answers():
            assert time.monotonic() < end, "redis-server does not answer"
            time.sleep(0.02)

    def _answers(self):
        import redis

        try:
            return self.client.ping()
        except redis.exceptions.ConnectionError:
            return False

    def kill(self):
        """Kill it without warning."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def url(self, stream):
        """The address of a stream."""
        return f"redis://127.0.0.1:{self.port}/{stream}"
