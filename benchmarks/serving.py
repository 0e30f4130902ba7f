"""Scores over HTTP: candidates per second at the peak, latency at half of it, and opening a large folder.

The demo's DLRM (26 id features, 13 numbers, embeddings of 16) is trained, exported and served by `rowhaul
serve` and by the plain FastAPI server of `serving_peer.py`, each with a process for each core. `wrk` asks
both in turn, with the same requests of 500 candidates; half of the columns are shared by all candidates of a
request. Client and server share the machine's cores. Processor time a request is the servers' alone, and
depends less on what else runs. Then a folder with a large file of rows is opened in a new process.

    python benchmarks/serving.py [--seconds 5] [--repeats 3] [--open-gb 5] [--samples 400000]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from report import console, print_machine, print_table
from rowhaul._manifest import write_manifest
from rowhaul._ports import free_port
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter
from rowhaul.data.schema import Schema
from rowhaul.export.serving.row_file import UnknownIds, write_rows
from rowhaul.serve.bodies import ARROW, JSON
from rowhaul.serve.folder import MANIFEST_FILE
from rowhaul.store import TableSpec
from rowhaul.store.served_rows import RecordBlock, ServedRows, equal_records

CANDIDATES = 500
CONNECTIONS = 8
BODIES = 16
_HERE = Path(__file__).parent
_LUA = """
local requests, number, delays = {}, 0, %s
wrk.method = "POST"
wrk.headers["Content-Type"] = "%s"
wrk.headers["Accept"] = "%s"
init = function(arguments)  -- once, since the client takes its time from the server's cores
  for place = 0, %d do
    local file = io.open("%s/" .. place, "rb")
    requests[place] = wrk.format(nil, nil, nil, file:read("*a"))
    file:close()
  end
end
request = function()
  number = (number + 1) %% %d
  return requests[number]
end
if delays > 0 then delay = function() return math.floor(delays * 2 * math.random() + 0.5) end end
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('{"requests": %%d, "us": %%d, "p50": %%f, "p99": %%f, "errors": %%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


class Load:
    """Requests in files, for wrk."""

    def __init__(self, folder: Path, log: Path, schema: Schema) -> None:
        self._folder = folder
        names = schema.column_names(with_label=False)
        shared = {*schema.features[::2], *(one.name for one in schema.dense[::2])}
        table = pq.read_table(sorted(log.glob("test/*.parquet"))[0], columns=names)
        for number in range(BODIES):
            some = table.slice(number * CANDIDATES % (len(table) - CANDIDATES), CANDIDATES)
            one = {name: some[name][0].as_py() for name in names if name in shared}
            rest = some.select([name for name in names if name not in shared]).combine_chunks()
            self._write("json", number, json.dumps({"shared": one, "candidates": rest.to_pydict()}).encode())
            rest, sink = rest.replace_schema_metadata({"shared": json.dumps(one)}), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rest.schema) as stream:
                stream.write_table(rest)
            self._write("arrow", number, sink.getvalue().to_pybytes())

    def _write(self, kind: str, number: int, content: bytes) -> None:
        (self._folder / kind).mkdir(exist_ok=True)
        (self._folder / kind / str(number)).write_bytes(content)

    def bytes(self, kind: str) -> int:
        return (self._folder / kind / "0").stat().st_size

    def ask(
        self, url: str, server_pid: int, kind: str, seconds: float, delay_ms: float = 0.0
    ) -> dict[str, float]:
        """Ask for some seconds; each connection waits for ``delay_ms`` on average before a request."""
        script, mime = self._folder / "load.lua", {"json": JSON, "arrow": ARROW}[kind]
        script.write_text(_LUA % (delay_ms, mime, mime, BODIES - 1, self._folder / kind, BODIES))
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "10s", "-s", script]
        before = cpu_seconds(server_pid)
        done = subprocess.run(
            [*map(str, command), f"{url}/score"], capture_output=True, text=True, check=True
        )
        found = json.loads(re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)[-1])
        if found["errors"]:
            raise RuntimeError(f"{found['errors']} errors: {done.stdout}")
        cpu_ms = 1e3 * (cpu_seconds(server_pid) - before) / max(found["requests"], 1)
        rate = found["requests"] / (found["us"] / 1e6)
        return {"rate": rate, "p50": found["p50"] / 1e3, "p99": found["p99"] / 1e3, "cpu": cpu_ms}


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its children."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextmanager
def server(command: list[str], port: int, **variables: str) -> Iterator[tuple[str, int]]:
    """A server that answers: its URL and process."""
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/healthz", timeout=2)
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def measure(
    load: Load, servers: dict[str, tuple[str, int, str]], seconds: float, repeats: int
) -> dict[str, dict]:
    """Medians of each server, which take turns: peak, and latency at half of it."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in servers}
    for one in servers.values():
        load.ask(*one, 2)
    for _ in range(repeats):
        for name, one in servers.items():
            peak = load.ask(*one, seconds)
            delay = 1e3 * CONNECTIONS / peak["rate"]
            half = load.ask(*one, seconds, delay)
            if half["rate"] > 0.55 * peak["rate"] or half["rate"] < 0.45 * peak["rate"]:  # correct it once
                delay += 1e3 * CONNECTIONS * (2 / peak["rate"] - 1 / half["rate"])
                half = load.ask(*one, seconds, max(delay, 0.6))
            values = {"peak": peak["rate"] * CANDIDATES, "cpu": peak["cpu"], "p99 at the peak": peak["p99"]}
            values |= {"half": half["rate"] * CANDIDATES, "p50": half["p50"], "p99": half["p99"]}
            for what, value in values.items():
                found[name].setdefault(what, []).append(value)
    return {
        name: {what: statistics.median(some) for what, some in one.items()} for name, one in found.items()
    }


class _ManyRows:
    """A checkpoint of one table that is made as it is read."""

    def __init__(self, num_rows: int, dim: int) -> None:
        self._num_rows, self._dim = num_rows, dim

    def format(self, table: str) -> _ManyRows:
        return self

    def served_rows(self, reader: object, table: str) -> ServedRows:
        return ServedRows(self._dim, "float32", self._num_rows, 4 * self._dim, self._keys, self._records)

    def _keys(self) -> Iterator[np.ndarray]:
        for first in range(0, self._num_rows, 1 << 18):
            yield np.arange(first, min(first + (1 << 18), self._num_rows))

    def _records(self) -> Iterator[RecordBlock]:
        for keys in self._keys():
            yield equal_records(keys, np.full((len(keys), self._dim), 0.01, np.float32))


def open_large(served: Path, folder: Path, size: float) -> tuple[float, float, float]:
    """Bytes of a folder like the given one with more rows, seconds to open it, and of the first request."""
    dim = 16
    shutil.copytree(served, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    path = folder / manifest["rows"]["file"]
    tables = list(dict.fromkeys(one["table"] for one in manifest["features"]))
    unknown = UnknownIds("init", 0, {name: TableSpec(name, dim, -0.01, 0.01) for name in tables})
    reader = _ManyRows(int(size / len(tables) / (4 * dim + 10)), dim)
    needed = cast(CheckpointReader, reader)  # it has all that is asked of a reader
    header = write_rows(needed, tables, unknown, path, 1, Counter(1, lambda done, total: None))
    manifest["rows"] |= {"bytes": path.stat().st_size, "header": header}
    del manifest["xxh3"]
    (folder / MANIFEST_FILE).write_bytes(write_manifest(manifest))
    program = (
        "import sys, time, json; from rowhaul.serve import Scorer; began = time.perf_counter()\n"
        "scorer = Scorer(sys.argv[1]); opened = time.perf_counter()\n"
        "names = scorer.folder.schema.column_names(False)\n"
        "scorer.score({name: 7 for name in names}, [{}]); print(opened - began, time.perf_counter() - opened)"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, folder], capture_output=True, text=True, check=True
        )
        seconds.append([float(one) for one in done.stdout.split()])
    opened, first = (statistics.median(some) for some in zip(*seconds, strict=True))
    return path.stat().st_size, opened, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--open-gb", type=float, default=5.0)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes of `rowhaul serve`")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        console.print("skipped: wrk is not installed (Debian: apt-get install wrk)")
        return
    print_machine("onnxruntime", "fastapi", "uvicorn", "pyarrow")
    console.print(f"load average {os.getloadavg()[0]:.1f} before anything was started")
    with tempfile.TemporaryDirectory(prefix="rowhaul-serving-") as given:
        folder = Path(given)
        rowhaul = [sys.executable, "-m", "rowhaul"]
        demo = [*rowhaul, "demo", "--rows", str(options.samples), "--out", str(folder / "demo")]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        run, served = folder / "demo" / "run", folder / "served"
        export = [*rowhaul, "export", str(run), "--out", str(served), "--dense", "onnx"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        load = Load(folder, folder / "demo" / "logs", Schema.read(served / "schema.yaml"))
        ports, workers = (free_port(), free_port()), str(options.workers)
        peers = str(cores)
        ours = [*rowhaul, "serve", str(served), "--port", str(ports[0]), "--workers", workers]
        peer = [sys.executable, "-m", "uvicorn", "serving_peer:app", "--app-dir", str(_HERE)]
        peer += ["--port", str(ports[1]), "--workers", peers, "--log-level", "warning"]
        with server(ours, ports[0]) as one, server(peer, ports[1], ROWHAUL_PEER_RUN=str(run)) as other:
            servers = {
                "rowhaul serve, Arrow": (*one, "arrow"),
                "rowhaul serve, JSON": (*one, "json"),
                "FastAPI + EmbeddingBag, JSON": (*other, "json"),
            }
            found = measure(load, servers, options.seconds, options.repeats)
        columns, counts = ["peak", "cpu", "p99 at the peak", "half", "p50", "p99"], ("peak", "half")
        plain = found["FastAPI + EmbeddingBag, JSON"]
        rows = [
            [
                name,
                *(f"{one[what]:,.0f}" if what in counts else f"{one[what]:.1f}" for what in columns),
                f"{one['peak'] / plain['peak']:.2f}x",
                f"{plain['cpu'] / one['cpu']:.2f}x",
            ]
            for name, one in found.items()
        ]
        kinds = f"{load.bytes('arrow'):,} bytes in Arrow, {load.bytes('json'):,} in JSON"
        print_table(
            f"processes: {workers} of rowhaul serve, {peers} of the plain server; {CANDIDATES} candidates a "
            f"request ({kinds}); medians of {options.repeats}",
            [
                *("", "candidates/s, peak", "CPU ms a request", "p99, ms", "candidates/s, half", "p50, ms"),
                *("p99, ms", "peak", "by CPU"),
            ],
            rows,
        )
        if options.open_gb:
            size, opened, first = open_large(served, folder / "large", options.open_gb * 1e9)
            console.print(
                f"opening a folder with {size / 1e9:.2f} GB of rows: {opened:.3f} s; its first request, "
                f"which loads kernels and pages: {first:.3f} s (medians of 3 processes)"
            )


if __name__ == "__main__":
    main()
