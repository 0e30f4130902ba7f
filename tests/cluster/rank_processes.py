"""Real processes as ranks: each runs a script with torchrun's variables and reports lines of JSON."""

import contextlib
import json
import os
import subprocess
import sys
import threading

from rowhaul._ports import free_port

PRELUDE = """
import json, os, signal, sys, threading, time
import numpy as np
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from rowhaul.cluster import *
from rowhaul.errors import *

def say(**report):
    print(json.dumps(report), flush=True)

def wait_for_go():
    say(ready=True)
    sys.stdin.readline()

rank = int(os.environ["RANK"])
"""


class RankProcess:
    """One rank; `reports` are the objects it has printed."""

    def __init__(self, rank, world_size, port, script, **variables):
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script],
            env={
                **{name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"},
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.reports, self.errors = [], []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read_reports, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, name, seconds=200):
        """The value of the first report that has a name."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(name) or self.process.poll() is not None, seconds)
            values = self._find(name)
        assert values, f"rank {self.rank} did not report {name}: {''.join(self.errors)}"
        return values[0]

    def wait(self, seconds=200):
        """The reports as one dictionary, and the exit code."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(60)
        return {name: value for report in self.reports for name, value in report.items()} | {"code": code}

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(60)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()

    def _find(self, name):
        return [report[name] for report in self.reports if name in report]

    def _read_reports(self):
        for line in self.process.stdout:
            with self._changed:
                with contextlib.suppress(json.JSONDecodeError):
                    self.reports.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self.process.wait()
            self._changed.notify_all()

    def _read_errors(self):
        self.errors.extend(self.process.stderr)


def go(ranks):
    """Release ranks from `wait_for_go` once all have started: some start much later than others."""
    for rank in ranks:
        rank.wait_for("ready")
    for rank in ranks:
        rank.process.stdin.write("\n")
        rank.process.stdin.flush()


@contextlib.contextmanager
def started(script, world_size, ranks=None, **variables):
    """Start ranks of a world, all by default, and end whatever is left of them."""
    port = free_port()
    chosen = range(world_size) if ranks is None else ranks
    processes = [RankProcess(rank, world_size, port, script, **variables) for rank in chosen]
    try:
        yield processes
    finally:
        for process in processes:
            process.end()
