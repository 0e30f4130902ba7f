"""Kills a trainer, a server and Redis at random: no sample is lost or doubled, no score is wrong.

A producer adds entries with explicit ids to a Redis stream (`appendfsync always`), so that one whose answer
was lost is not added twice. `rowhaul train --publish` learns from it, `rowhaul serve` applies what is
published, and a client asks for the same scores all the time. One of the three is killed (`kill -9`) after a
random time and started again: each once it works, a trainer when it has published something, a server when it
has answered. After the given number of kills the rest is learned, and compared with training on the same
samples in a file:

    the same bits    of all rows, their optimizer state and the dense weights
    no wrong score   each answer is what the undisturbed model says after as many steps, to 1e-6

python benchmarks/kills.py [--kills 50] [--seed 1] [--rate 250]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from report import print_machine, print_table
from rowhaul._ports import free_port
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.trainer import Trainer

IN_ENTRY, BATCH, DIM = 10, 128, 4
ASKED = 50  # candidates
CONFIG = TrainConfig(model=ModelConfig(embedding_dim=DIM), batch_size=BATCH, threads=1)
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
        self.redis_port, self.port = free_port(), free_port()
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
        self.num_answers, self.wrong = 0, set[int]()

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
            self.wrong.add(found["step"])
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
    parser.add_argument("--rate", type=float, default=250.0, help="samples a second")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--longest", type=float, default=6.0, help="seconds between two kills")
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
    names = schema.column_names(with_label=False)
    candidates = [{name: row[name] for name in names} for row in rows[:ASKED]]
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
    began, published, answered = time.monotonic(), "", 0
    for number in range(given.kills):
        time.sleep(chance.uniform(0, given.longest))
        part = chance.choice(["redis", "trainer", "server"])
        if part == "trainer":
            before = published
            wait_until(lambda before=before: newest(parts) != before, parts)
        if part == "server":
            before = answered
            wait_until(lambda before=before: client.num_answers > before, parts, others=("server",))
        parts.kill(part)
        if part == "trainer":
            published = newest(parts)
        if part == "server":
            answered = client.num_answers + 1  # one may be on its way
        kills[part] += 1
        time.sleep(chance.uniform(0, 1))
        parts.start(part)
        seconds = time.monotonic() - began
        print(f"{number + 1}: {seconds:.0f} s: killed {part}; {len(client.scores)} steps seen", flush=True)
    hurry.set()
    sent.join()
    parts.kill("trainer")
    parts.start("trainer", "--stop-when-idle", "10s")
    parts.processes["trainer"].wait()
    last = open_checkpoint(parts.run).facts
    wait_until(lambda: client.ask() == last["step"], parts, others=("server",))
    client.ended.set()
    client.join()
    (folder / "file").mkdir()
    pq.write_table(table, folder / "file" / "part-0.parquet")
    train_run(CONFIG, schema, folder / "file", out=folder / "reference")
    same = bits(parts.run) == bits(folder / "reference")
    expected = undisturbed_scores(schema, folder / "file", set(client.scores))
    away = {
        step: max(abs(a - b) for a, b in zip(scores, expected[step], strict=True))
        for step, scores in client.scores.items()
    }
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
            ("largest difference from the undisturbed model of that step", f"{max(away.values()):.2g}"),
        ],
    )
    assert last["samples"] == len(rows)
    assert same
    assert not client.wrong
    assert max(away.values()) < 1e-6


def newest(parts: Parts) -> str:
    """Name the newest version."""
    about = json.loads((parts.served / "served.json").read_text())["published"]
    return str(about["deltas"][-1]["to"] if about["deltas"] else about["version"])


def undisturbed_scores(schema: Schema, file: Path, steps: set[int]) -> dict[int, list[float]]:
    """Learn from the same samples once more; returns what the model says after some of the steps."""
    torch.set_num_threads(CONFIG.threads)
    trainer = Trainer(CONFIG, schema)
    asked = Batch.from_samples(next(iter(SampleStream(file, schema, ASKED, limit=ASKED))))
    found: dict[int, list[float]] = {}

    def ask() -> None:
        if trainer.step in steps:
            trainer.model.eval()
            with torch.no_grad():
                found[trainer.step] = torch.sigmoid(trainer.model(asked).double()).tolist()

    ask()
    for samples in SampleStream(file, schema, BATCH):
        trainer.train_step(Batch.from_samples(samples))
        ask()
    return found


def wait_until(condition: Any, parts: Parts, others: tuple[str, ...] = ("trainer", "redis")) -> None:
    """Wait; an end of a process that is needed for it is an error."""
    while not condition():
        for part in others:
            assert parts.processes[part].poll() is None, (parts.folder / f"{part}.log").read_text()[-2000:]
        time.sleep(0.1)


if __name__ == "__main__":
    main()
