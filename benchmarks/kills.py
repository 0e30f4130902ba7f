"""Kills a trainer, a server and Redis at random: no sample is lost or doubled, no score is wrong.

A producer adds entries with explicit ids to a Redis stream (`appendfsync always`), so that one whose answer
was lost is not added twice. `rowhaul train --publish` learns from it, `rowhaul serve` applies what is
published, and a client asks for the same scores all the time. One of the three is killed (`kill -9`) after a
random time and started again, a trainer once it has published something. After the given number of kills the
rest is learned, and compared with a run over the same samples in a file:

    the same bits    of all rows, their optimizer state and the dense weights
    no wrong score   answers of one step are the same whenever they came, and those of the last step are
                     those of the undisturbed run, exported

python benchmarks/kills.py [--kills 50] [--seed 1] [--rate 500]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from report import print_machine, print_table
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.export.serving.folder import export_served
from rowhaul.serve import Scorer
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.run_folder import open_saved

IN_ENTRY, BATCH, DIM = 10, 128, 4
SETTINGS = [
    "--batch-size",
    str(BATCH),
    "--embedding-dim",
    str(DIM),
    "--threads",
    "1",
    "--checkpoint-every",
    "10",
]


class Parts:
    """Redis, trainer and server, each of which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        import redis

        self.folder, self.run, self.served = folder, folder / "run", folder / "served"
        self.redis_port, self.port = _free_port(), _free_port()
        self.client = redis.Redis(port=self.redis_port, socket_timeout=10)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.away = redis.exceptions.ConnectionError, redis.exceptions.TimeoutError
        self.refused = redis.exceptions.ResponseError

    def start(self, part: str, *more: str) -> None:
        """Start one of them."""
        command = {"redis": self._redis, "trainer": self._trainer, "server": self._server}[part]()
        with (self.folder / f"{part}.log").open("ab") as log:
            self.processes[part] = subprocess.Popen([*command, *more], stdout=log, stderr=log)

    def kill(self, part: str) -> None:
        """Kill one of them without warning."""
        self.processes[part].kill()
        self.processes[part].wait()

    def close(self) -> None:
        """End all."""
        for part in self.processes:
            self.kill(part)

    def _redis(self) -> list[str]:
        options = [
            "--port",
            str(self.redis_port),
            "--dir",
            str(self.folder),
            "--save",
            "",
            "--bind",
            "127.0.0.1",
        ]
        return ["redis-server", *options, "--appendonly", "yes", "--appendfsync", "always"]

    def _trainer(self) -> list[str]:
        command = [sys.executable, "-m", "rowhaul", "train", "--out", str(self.run), *SETTINGS]
        command += ["--data", f"redis://127.0.0.1:{self.redis_port}/clicks", "--schema"]
        command += [str(self.folder / "log" / "schema.yaml"), "--publish", str(self.served)]
        resume = ["--resume"] if (self.run / "config.yaml").exists() else []
        return [*command, "--publish-every", "1s", "--set", "publish.compact_after=5", *resume]

    def _server(self) -> list[str]:
        command = [sys.executable, "-m", "rowhaul", "serve", str(self.served), "--port", str(self.port)]
        return [*command, "--refresh", "0.3"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def produce(parts: Parts, rows: list[dict[str, Any]], rate: float, ends: threading.Event) -> None:
    """Add all samples, each once, whatever happens to Redis; in haste after the last kill."""
    for number in range(0, len(rows), IN_ENTRY):
        lines = "\n".join(json.dumps(row) for row in rows[number : number + IN_ENTRY])
        while True:
            try:
                parts.client.xadd("clicks", {"json": lines}, id=f"{number + 1}-1")
                break
            except parts.away:
                time.sleep(0.05)
            except parts.refused as error:
                if "equal or smaller" in str(error):  # it was added, but the answer was lost
                    break
                if "LOADING" not in str(error):
                    raise
                time.sleep(0.05)
        ends.wait(IN_ENTRY / rate)


class Client(threading.Thread):
    """Asks for the same scores all the time, and keeps them by step."""

    def __init__(self, url: str, body: bytes) -> None:
        super().__init__(daemon=True)
        self._url, self._body, self.ended = url, body, threading.Event()
        self.scores: dict[int, list[float]] = {}
        self.num_answers, self.wrong = 0, list[int]()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            self.ask()

    def ask(self) -> int:
        """Ask once; returns the step, -1 where there is no answer."""
        request = urllib.request.Request(self._url, self._body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found = json.loads(answer.read())
        except (OSError, ValueError):  # it is down, or was killed while it answered
            return -1
        self.num_answers += 1
        if self.scores.setdefault(found["step"], found["scores"]) != found["scores"]:
            self.wrong.append(found["step"])
        return int(found["step"])


def bits(run: Path) -> dict[str, bytes]:
    """Everything that a run has learned."""
    reader = open_checkpoint(run)
    groups = ("model", "dense-optimizer")
    found = {
        f"{group} {n}": t.numpy().tobytes() for group in groups for n, t in reader.tensors(group).items()
    }
    for table in reader.tables:
        for keys, records in reader.rows(table):
            found |= {f"{table} {k}": row.tobytes() for k, row in zip(keys.tolist(), records, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=500.0, help="samples a second")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--longest", type=float, default=12.0, help="seconds between two kills")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowhaul-kills-"))
    parts = Parts(folder)
    try:
        print_machine()
        torment(parts, given)
    finally:
        parts.close()
    shutil.rmtree(folder)


def torment(parts: Parts, given: argparse.Namespace) -> None:
    """Kill, end in peace, compare, print."""
    folder, chance, kills = parts.folder, random.Random(given.seed), Counter[str]()
    generate_folder("criteo", given.rows, folder / "log", seed=given.seed, test_share=0.0)
    schema = Schema.read(folder / "log" / "schema.yaml")
    table = pq.read_table(sorted((folder / "log").glob("*.parquet")))
    rows = table.select(schema.column_names()).to_pylist()
    candidates = [
        {name: value for name, value in row.items() if name != schema.label.name} for row in rows[:50]
    ]
    body = json.dumps({"shared": {}, "candidates": candidates}).encode()
    parts.start("redis")
    hurry = threading.Event()
    sent = threading.Thread(target=produce, args=(parts, rows, given.rate, hurry), daemon=True)
    sent.start()
    parts.start("trainer")
    wait_until((parts.served / "served.json").exists, parts)
    parts.start("server")
    client = Client(f"http://127.0.0.1:{parts.port}/score", body)
    client.start()
    published = ""
    for number in range(given.kills):
        time.sleep(chance.uniform(0, given.longest))
        part = chance.choice(["redis", "trainer", "server"])
        if part == "trainer":
            before = published
            wait_until(lambda before=before: newest(parts) != before, parts)
        parts.kill(part)
        published = newest(parts)
        kills[part] += 1
        time.sleep(chance.uniform(0, 1))
        parts.start(part)
        print(f"{number + 1}: killed {part}; steps seen {len(client.scores)}", flush=True)
    hurry.set()
    sent.join()
    parts.kill("trainer")
    parts.start("trainer", "--stop-when-idle", "10s")
    parts.processes["trainer"].wait()
    last = open_checkpoint(parts.run).facts
    wait_until(lambda: client.ask() == last["step"], parts, others=("server",))
    client.ended.set()
    client.join()
    reference(folder, schema, table)
    same = bits(parts.run) == bits(folder / "reference")
    export_served(open_saved(str(folder / "reference")), folder / "exported")
    expected = Scorer(folder / "exported").score({}, candidates).tolist()
    close = max(abs(a - b) for a, b in zip(client.scores[last["step"]], expected, strict=True))
    named = ", ".join(f"{part} {count}" for part, count in sorted(kills.items()))
    print_table(
        "What is left after kills",
        ["", ""],
        [
            ("kills", f"{sum(kills.values())} ({named})"),
            ("samples sent, learned", f"{len(rows):,}, {last['samples']:,}"),
            ("the bits of an undisturbed run", str(same)),
            ("answers, steps they are of", f"{client.num_answers:,}, {len(client.scores):,}"),
            ("steps with two different answers", str(len(client.wrong))),
            ("largest difference from the undisturbed model", f"{close:.2g}"),
        ],
    )
    assert last["samples"] == len(rows)
    assert same
    assert not client.wrong
    assert close < 1e-6


def newest(parts: Parts) -> str:
    """Name the newest version."""
    about = json.loads((parts.served / "served.json").read_text())["published"]
    return str(about["deltas"][-1]["to"] if about["deltas"] else about["version"])


def reference(folder: Path, schema: Schema, table: pa.Table) -> None:
    """Learn from the same samples in a file, undisturbed."""
    config = TrainConfig(model=ModelConfig(embedding_dim=DIM), batch_size=BATCH, threads=1)
    (folder / "file").mkdir()
    pq.write_table(table, folder / "file" / "part-0.parquet")
    train_run(config, schema, folder / "file", out=folder / "reference")


def wait_until(condition: Any, parts: Parts, others: tuple[str, ...] = ("trainer", "redis")) -> None:
    """Wait; an end of a process that is needed for it is an error."""
    while not condition():
        for part in others:
            assert parts.processes[part].poll() is None, (parts.folder / f"{part}.log").read_text()[-2000:]
        time.sleep(0.1)


if __name__ == "__main__":
    main()
