"""What publishing costs: training, a server that applies deltas, and how soon a score knows an event.

One process trains on samples of 26 ids and 13 numbers. Parts, each in turns in one run:

    training     without publishing, with a version a minute, and every 5 s; CPU is that of all threads of the
                 process for a million samples, which depends less on what else runs than samples/s do
    applying     a delta of 100,000 rows on a base of a million, while another thread scores 500 candidates a
                 request: seconds to apply it, and the requests' p50 and p99 with and without deltas
    latency      events go to a Redis stream at a steady rate, `rowhaul train --publish-every 5s` learns from
                 it, a `Scorer` refreshes every 0.2 s: the age of the newest event that scores know, just
                 before the next version comes, which is when it is oldest, and the stages it consists of
                 (left out without redis-server). CPU is the trainer's, for a million events

python benchmarks/deltas.py [--rows 400000] [--repeats 3] [--rate 5000] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

from report import print_machine, print_table
from rowhaul.checkpoint.progress import Counter
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.publishing.changed_rows import TableChange, served
from rowhaul.publishing.folder import PublishedFolder, State
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve import Scorer
from rowhaul.serve.deltas import Moment
from rowhaul.serve.requests import Samples
from rowhaul.serve.rows import IdBags
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.trainer import Trainer

BATCH = 4096
CANDIDATES = 500
BASE_ROWS, DELTA_ROWS = 1_000_000, 100_000
IN_ENTRY = 50  # samples of a Redis entry
Rows = list[tuple[str, ...]]


def training(folder: Path, schema: Schema, repeats: int) -> Rows:
    """Train with and without publishing."""
    ways = {"no publishing": {}, "every minute": {"every": "1min"}, "every 5 s": {"every": "5s"}}
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
    for repeat in range(repeats):
        for way, publish in ways.items():
            out = folder / f"run-{way}-{repeat}".replace(" ", "-")
            given = {**publish, "to": str(out / "served")} if publish else {}
            config = TrainConfig.from_dict({"batch_size": BATCH, "publish": given, "threads": 1})
            marks: list[tuple[float, float]] = []

            def first_step(marks: list[tuple[float, float]] = marks) -> bool:
                marks.append((time.perf_counter(), time.process_time()))
                return False

            train_run(config, schema, f"{folder}/log/*.parquet", out=out, should_stop=first_step)
            (began, cpu_began), (ended, cpu_ended) = marks[0], marks[-1]
            samples = (len(marks) - 1) * BATCH
            deltas = 0
            if publish:
                about = json.loads((out / "served" / "served.json").read_text())["published"]
                deltas = int(about["deltas"][-1]["to"].rpartition(".")[2]) if about["deltas"] else 0
            cpu = (cpu_ended - cpu_began) / samples * 1e6
            found[way].append((samples / (ended - began), cpu, deltas))
            shutil.rmtree(out)
    plain = found["no publishing"]
    return [
        (
            way,
            f"{statistics.median(one[0] for one in turns):,.0f}",
            f"{statistics.median(one[0] / other[0] for one, other in zip(turns, plain, strict=True)):.3f}",
            f"{statistics.median(one[1] for one in turns):.1f} s",
            f"{statistics.median(one[1] / other[1] for one, other in zip(turns, plain, strict=True)):.3f}",
            f"{statistics.median(one[2] for one in turns):.0f}",
        )
        for way, turns in found.items()
    ]


class _Made:
    """Publishes rows that nobody has trained."""

    def __init__(self, path: Path, schema: Schema) -> None:
        trainer = Trainer(TrainConfig(), schema)
        configs = trainer.collection.embedding_bag_configs()
        self._tables = {one.name: (one.embedding_dim, "float32") for one in configs}
        self._weights = {name: one.detach() for name, one in trainer.model.named_parameters()}
        self._folder = PublishedFolder(path, "a", trainer, GraphWriter.exported(trainer.model, ["onnx"]))
        self._folder.write_base(
            self._rows(BASE_ROWS, 0), self._state(0), Counter(1, lambda done, total: None)
        )

    def publish(self, step: int) -> None:
        """Publish a delta."""
        name, folder = self._folder.begin_delta()
        part = self._folder.write_part(folder, "r0000", self._rows(DELTA_ROWS, step), step)
        self._folder.end_delta(name, [part], self._state(step))

    def _rows(self, count: int, step: int) -> dict:
        each, random = count // len(self._tables), np.random.default_rng(step)
        changes = {}
        for table, (dim, _) in self._tables.items():
            keys = np.unique(random.integers(0, 2 * BASE_ROWS // len(self._tables), 2 * each))[:each]
            values = np.full((len(keys), dim), 0.01, np.float32)
            changes[table] = TableChange(keys, values, np.empty(0, np.int64))
        return served(WholeRows(), changes, self._tables, lambda: None)

    def _state(self, step: int) -> State:
        return State(Moment(step, step, time.time(), None), self._weights, {})


def applying(folder: Path, schema: Schema, turns: int) -> Rows:
    """Apply deltas while a thread scores."""
    made = _Made(folder / "made", schema)
    scorer = Scorer(folder / "made")
    scorer.warm_up()
    seconds: list[float] = []
    latencies: dict[bool, list[float]] = {False: [], True: []}
    has_deltas, ends = threading.Event(), threading.Event()
    random, count = np.random.default_rng(0), len(schema.features)
    ids = random.integers(0, 100_000, count * CANDIDATES)
    bags = IdBags(ids, np.arange(len(ids) + 1), np.arange(count + 1) * CANDIDATES, CANDIDATES)
    samples = Samples(bags, np.zeros((CANDIDATES, len(schema.dense)), np.float32))

    def ask() -> None:
        while not ends.is_set():
            began, during = time.perf_counter(), has_deltas.is_set()
            scorer.score_samples(samples)
            if during == has_deltas.is_set():
                latencies[during].append(time.perf_counter() - began)

    thread = threading.Thread(target=ask)
    thread.start()
    for step in range(1, turns + 1):
        made.publish(step)
        time.sleep(0.5)
        has_deltas.set()
        began, cpu = time.perf_counter(), time.thread_time()
        scorer.refresh()
        seconds.append(time.perf_counter() - began)
        cpu = time.thread_time() - cpu
        has_deltas.clear()
        time.sleep(1.5)
    ends.set()
    thread.join()
    base, deltas = (np.percentile(latencies[one], [50, 99]) * 1000 for one in (False, True))
    return [
        (
            "a delta of 100,000 rows is applied in",
            f"{statistics.median(seconds):.2f} s",
            f"{max(seconds):.2f} s",
        ),
        ("of which this thread's CPU, the last one", f"{cpu:.2f} s", ""),
        ("p50, p99 without deltas", f"{base[0]:.1f} ms", f"{base[1]:.1f} ms"),
        ("p50, p99 while they are applied", f"{deltas[0]:.1f} ms", f"{deltas[1]:.1f} ms"),
        ("ratio", f"{deltas[0] / base[0]:.2f}", f"{deltas[1] / base[1]:.2f}"),
    ]


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a server; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--dir", str(folder), "--save", "", "--logfile", "redis.log"]
    process = subprocess.Popen(["redis-server", *options])
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def latency(folder: Path, schema: Path, lines: list[str], rate: int, seconds: float) -> Rows:
    """Send events at a rate, learn from them, and see how old those are that scores know."""
    import redis

    served, run = folder / "live-served", folder / "live-run"
    with redis_server(folder) as port:
        client = redis.Redis(port=port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.1), 50))
        client.ping()
        sent, ends = 0, threading.Event()

        def send() -> None:
            nonlocal sent
            began = time.perf_counter()
            while not ends.is_set():
                due = int((time.perf_counter() - began) * rate)
                while sent < due:
                    first = sent % (len(lines) - IN_ENTRY)
                    client.xadd("clicks", {"json": "\n".join(lines[first : first + IN_ENTRY])})
                    sent += IN_ENTRY
                time.sleep(0.005)

        command = [sys.executable, "-m", "rowhaul", "train", "--data", f"redis://127.0.0.1:{port}/clicks"]
        command += ["--schema", str(schema), "--out", str(run), "--publish", str(served)]
        command += ["--publish-every", "5s", "--batch-size", "2048", "--checkpoint-every", "1min"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (served / "served.json").exists():
            assert process.poll() is None
            time.sleep(0.1)
        scorer = Scorer(served)
        sender = threading.Thread(target=send)
        sender.start()
        began, seen, read_ages = time.time(), list[_Seen](), list[float]()
        while time.time() - began < seconds:
            read_ages.append(_age_of_newest_read(client))
            if scorer.refresh().num_deltas:
                written = (served / "served.json").stat().st_mtime
                moment, used = scorer.model.moment, _cpu_seconds(process.pid)
                seen.append(_Seen(moment, written, time.time(), statistics.median(read_ages), used))
                read_ages.clear()
            time.sleep(0.2)
        ends.set()
        sender.join()
        process.send_signal(signal.SIGTERM)
        process.wait()
    return [("events sent, a second", f"{sent / seconds:,.0f}", ""), *_stages(seen[1:])]


class _Seen(NamedTuple):
    """A version, as a reader saw it."""

    moment: Moment
    written: float  # when the manifest named it
    applied: float
    read_age: float  # of the newest event that the trainer had been given, the median since the last one
    cpu: float  # of the trainer so far


def _age_of_newest_read(client: Any) -> float:
    groups = client.xinfo_groups("clicks") if client.exists("clicks") else []
    newest = int(groups[0]["last-delivered-id"].partition(b"-")[0]) if groups else 0
    return time.time() - newest / 1000 if newest else 0.0


def _cpu_seconds(pid: int) -> float:
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


def _stages(seen: list[_Seen]) -> Rows:
    """Take the time from an event to a score apart."""
    pairs = list(pairwise(seen))
    learned = seen[-1].moment.samples - seen[0].moment.samples
    took = seen[-1].moment.published_at - seen[0].moment.published_at
    ages = {
        "the newest event is given to the trainer": [one.read_age for one in seen],
        "it is trained on, and rows are copied": [
            one.moment.published_at - one.moment.event_time - one.read_age for one in seen
        ],
        "the delta is written": [one.written - one.moment.published_at for one in seen],
        "it is applied": [one.applied - one.written for one in seen],
        "the next version takes its place": [after.applied - one.applied for one, after in pairs],
        "event to score, at worst": [after.applied - one.moment.event_time for one, after in pairs],
        "event to score, on average": [
            after.applied - (one.moment.event_time + after.moment.event_time) / 2 for one, after in pairs
        ],
    }
    return [
        ("events learned from, a second", f"{learned / took:,.0f}", ""),
        ("CPU a million", f"{(seen[-1].cpu - seen[0].cpu) / learned * 1e6:.1f} s", ""),
        *((name, f"{statistics.median(one):.2f} s", f"{max(one):.2f} s") for name, one in ages.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parts", default="training,applying,latency")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rowhaul-deltas-"))
    try:
        print_machine()
        print(f"load of the machine: {os.getloadavg()[0]:.1f}\n")
        torch.set_num_threads(1)
        generate_folder("criteo", given.rows, folder / "log", seed=0, test_share=0.0)
        schema = Schema.read(folder / "log" / "schema.yaml")
        if "applying" in given.parts:
            print_table("Applying", ("", "median", "largest"), applying(folder, schema, 12))
        if "training" in given.parts:
            header = ("", "samples/s", "ratio", "CPU a million", "ratio", "versions")
            print_table("Training", header, training(folder, schema, given.repeats))
        if "latency" in given.parts and shutil.which("redis-server"):
            files = sorted((folder / "log").glob("*.parquet"))
            table = pq.read_table(files, columns=schema.column_names()).slice(0, 50_000)
            lines = [json.dumps(row) for row in table.to_pylist()]
            found = latency(folder, folder / "log" / "schema.yaml", lines, given.rate, given.seconds)
            print_table("From an event to a score", ("", "median", "largest"), found)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
