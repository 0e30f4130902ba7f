"""Learning from a stream against learning from the same samples in files; what progressive validation costs.

One process; each run learns from all samples, which are there already: files, the same without progressive
validation, a followed folder, lines of JSON from a pipe, and Redis streams whose entries have some samples
each, as JSON and as Arrow (left out without redis-server). Runs take turns; that all learn the same dense
weights, to the bit, is checked.

    samples/s    median over the repeats, without the first step
    of files     speed over that of files in the same repeat: the median
    CPU          seconds of all threads of the process, a million samples, with opening and saving: depends
                 less on what else runs

Then `rowhaul train --publish` in one process and on two workers, with a version at the beginning and the end
only, and with one every few seconds: what a version costs in CPU time, and how much of a minute of one core.

python benchmarks/online.py [--rows 200000] [--repeats 5] [--batch 4096] [--publish-every 3s]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from report import print_machine, print_table
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.stream_config import StreamConfig

IN_ENTRY = 50  # samples of a Redis entry
WINDOW = 100_000
Speed = tuple[float, float]  # samples a second, CPU seconds a million samples


class Redis:
    """A server of this run, with the samples in a stream; each run reads it with a group of its own."""

    def __init__(self, folder: Path, lines: list[str], table: pa.Table) -> None:
        import redis

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["--port", str(self.port), "--dir", str(folder), "--save", "", "--logfile", "redis.log"]
        self._server = subprocess.Popen(["redis-server", *options])
        client = redis.Redis(port=self.port)
        while True:
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                time.sleep(0.05)
        pipe = client.pipeline(transaction=False)
        for first in range(0, len(lines), IN_ENTRY):
            pipe.xadd("json", {"json": "\n".join(lines[first : first + IN_ENTRY])})
            some, sink = table.slice(first, IN_ENTRY), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, some.schema) as stream:
                stream.write_table(some)
            pipe.xadd("arrow", {"arrow": sink.getvalue().to_pybytes()})
        pipe.execute()

    def url(self, kind: str, repeat: int) -> str:
        """Return what to learn from."""
        return f"redis://127.0.0.1:{self.port}/{kind}?group=g{repeat}"

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        self._server.wait()


def piped(path: Path, run: Callable[[], Speed]) -> Speed:
    """Run with a file on standard input, from another process."""
    before = os.dup(0)
    with subprocess.Popen(["cat", str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        os.dup2(writer.stdout.fileno(), 0)
        try:
            return run()
        finally:
            os.dup2(before, 0)
            os.close(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--publish-every", default="3s")
    given = parser.parse_args()
    rows = given.rows // given.batch * given.batch  # whole batches: the last would wait for the end
    folder = Path(tempfile.mkdtemp(prefix="rowhaul-online-"))
    redis: Redis | None = None
    try:
        print_machine()
        generate_folder("criteo", rows, folder / "log", seed=0, test_share=0.0)
        schema = Schema.read(folder / "log" / "schema.yaml")
        files = sorted((folder / "log").glob("*.parquet"))
        table = pq.read_table(files, columns=schema.column_names())
        lines = [json.dumps(row) for row in table.to_pylist()]
        if shutil.which("redis-server"):
            redis = Redis(folder, lines, table)
        (folder / "lines").write_text("\n".join(lines))
        if given.repeats:
            measure(given, schema, folder, redis, rows)
        print_table(
            f"publishing, {rows:,} samples; CPU is that of all processes",
            ["", "versions", "CPU", "versions", "CPU", "CPU of a version", "of a minute"],
            [publishing(folder, workers, given) for workers in (0, 2)],
        )
    finally:
        if redis is not None:
            redis.close()
        shutil.rmtree(folder)


def publishing(folder: Path, workers: int, given: argparse.Namespace) -> list[Any]:
    """Train twice, with few versions and with many; returns a row of the table."""
    found: list[tuple[int, float]] = []
    for every in ("0", given.publish_every):
        run, served = folder / "published", folder / "served"
        command = [sys.executable, "-m", "rowhaul", "train", "--data", str(folder / "log"), "--threads", "1"]
        command += ["--out", str(run), "--batch-size", str(given.batch), "--checkpoint-every", "0"]
        command += ["--publish", str(served), "--publish-every", every]
        command += ["--workers", str(workers)] if workers else []
        used = children_seconds()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        about = json.loads((served / "served.json").read_text())["published"]
        newest = about["deltas"][-1]["to"] if about["deltas"] else about["version"]
        found.append((int(newest.rpartition(".")[2]) + 1, children_seconds() - used))
        shutil.rmtree(run)
        shutil.rmtree(served)
    (few, base), (many, used) = found
    each = (used - base) / max(many - few, 1)
    name = f"{workers} workers" if workers else "one process"
    return [name, few, f"{base:.1f} s", many, f"{used:.1f} s", f"{each:.2f} s", f"{each / 60:.1%}"]


def children_seconds() -> float:
    """CPU time of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(given: argparse.Namespace, schema: Schema, folder: Path, redis: Redis | None, rows: int) -> None:
    """Take turns, the first one to warm up, and print."""
    base = TrainConfig(
        model=ModelConfig("dlrm", 16), batch_size=given.batch, checkpoint_every=0, progressive_window=WINDOW
    )
    stream = replace(base, stream=StreamConfig(stop_when_idle="0.5s"))
    followed = replace(base, stream=StreamConfig(follow=True, stop_when_idle="0.5s"))
    weights: dict[str, Any] = {}

    def speed(name: str, config: TrainConfig, data: Any) -> Speed:
        out, used = folder / "run", time.process_time()
        result = train_run(config, schema, data, out=out)
        assert result.samples == rows
        weights[name] = open_checkpoint(out).tensors("model")
        shutil.rmtree(out)
        return result.samples_per_second, (time.process_time() - used) / rows * 1e6

    log = folder / "log"
    speeds: dict[str, list[Speed]] = {}
    for repeat in range(given.repeats + 1):
        runs: dict[str, Callable[[], Speed]] = {
            "files": lambda: speed("files", base, log),
            "files, not scored": lambda: speed("unscored", replace(base, progressive_window=0), log),
            "a followed folder": lambda: speed("folder", followed, log),
            "lines of JSON": lambda: piped(folder / "lines", lambda: speed("lines", stream, "-")),
        }
        if redis is not None:
            for kind in ("json", "arrow"):
                runs[f"Redis, {kind}"] = partial(speed, kind, stream, redis.url(kind, repeat))
        for name, run in runs.items():
            measured = run()
            if repeat:
                speeds.setdefault(name, []).append(measured)
    for name, tensors in weights.items():
        same = all(bool((tensors[one] == weights["files"][one]).all()) for one in tensors)
        assert same, f"{name} has learned something else than files"

    def compared(name: str, place: int) -> tuple[float, float]:
        ours, files = ([one[place] for one in speeds[which]] for which in (name, "files"))
        return statistics.median(ours), statistics.median(a / b for a, b in zip(ours, files, strict=True))

    print_table(
        f"{rows:,} samples of 26 ids, batches of {given.batch:,}",
        ["learning from", "samples/s", "of files", "CPU", "of files"],
        [[name, *(value for place in (0, 1) for value in compared(name, place))] for name in speeds],
    )


if __name__ == "__main__":
    main()
