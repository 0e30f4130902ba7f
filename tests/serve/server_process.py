"""A real `rowhaul serve` in a process of its own."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

BODY = {"shared": {"user": 7919, "item": "item-1", "tags": [1], "price": 0.5}, "candidates": [{}] * 2}


def start(folder, *options):
    """A server on a free port; returns its process and URL."""
    command = [sys.executable, "-m", "rowhaul", "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = process.stdout.readline()
    found = re.search(r"(http://\S+)/docs", line)
    assert found, line + process.communicate(timeout=200)[0]
    return process, found.group(1)


def wait_until_up(url):
    end = time.monotonic() + 200
    while time.monotonic() < end:
        try:
            return httpx.get(f"{url}/healthz", timeout=5).json()
        except httpx.HTTPError:
            time.sleep(0.1)
    raise AssertionError("the server did not come up")


def stop(process):
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def children_of(pid):
    """The processes a process has started to serve; multiprocessing's own helper is not one of them."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(one): Path(f"/proc/{one}/cmdline").read_bytes() for one in found}
    return {one for one, line in lines.items() if b"spawn_main" in line}


def wait_for(condition, what):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.1)
