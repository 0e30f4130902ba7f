"""A cluster under watch: what rank 0 serves is what was logged; a stopped rank turns the health check."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from scraping import health, scrape, wait_for

from rowhaul._ports import free_port

pytestmark = pytest.mark.slow


def lines_of(path, kind):
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["kind"] == kind]


def rank_processes(launcher):
    found = psutil.Process(launcher.pid).children(recursive=True)  # watchdogs, too, which are no ranks
    return {int(one.environ()["RANK"]): one for one in found if "RANK" in one.environ()}


def test_a_cluster_is_scraped_and_a_stopped_rank_shows(log_folder, tmp_path):
    port, run = free_port(), tmp_path / "run"
    command = [
        *(sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", run, "--epochs", "1000"),
        *("--workers", "2", "--stores", "1", "--cache", "300", "--batch-size", "40", "--embedding-dim", "4"),
        *("--set", "model.options.top=[8]", "--set", "log_every=1", "--log-json"),
        *("--metrics-port", port, "--stalled-after", "2"),
    ]
    launcher = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    ranks: dict[int, psutil.Process] = {}
    try:
        wait_for(lambda: scrape(port)["rowhaul_step"] > 30, 200)
        wait_for(lambda: health(port)[0] == 200, 100)  # on a busy machine not at every moment
        ranks = rank_processes(launcher)
        ranks[2].send_signal(signal.SIGSTOP)
        status, answer = wait_for(lambda: (one := health(port))[0] != 200 and one, 60)
        shown, cluster = scrape(port), lines_of(run / "metrics.jsonl", "cluster")  # nothing moves meanwhile
        assert status == 503
        assert "no progress for" in answer["reason"] or "rank 2 (store 0)" in answer["reason"]
        assert shown["rowhaul_healthy"] == 0
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 2
    finally:
        for process in ranks.values():
            if process.is_running():
                process.kill()
        launcher.kill()
        launcher.wait()
    assert shown.by("rowhaul_rank_iteration", "rank", "role").keys() == {
        ("0", "worker"), ("1", "worker"), ("2", "store")
    }  # fmt: skip
    links = shown.by("rowhaul_link_bytes_total", "source", "target")
    # With one segment and a line for every step, each line is about one iteration, beginning with the second
    # line; the port may show one iteration more than the last line.
    counted = round(sum(shown.by("rowhaul_rank_samples_total", "rank").values()) / 40)
    assert len(cluster) - 1 <= counted <= len(cluster)
    for way, end in (("sent", 0), ("received", 1)):
        for rank, name in enumerate(("worker 0", "worker 1", "store 0")):
            served = sum(value for link, value in links.items() if link[end] == str(rank))
            logged = sum(line.get(f"link/{name} {way} bytes", 0) for line in cluster[: counted + 1])
            more = 0 if counted < len(cluster) else served - logged
            assert served == pytest.approx(logged + more)
            assert 0 <= more <= 0.2 * served
    hits, lookups = (
        sum(shown.by(f"rowhaul_cache_{name}_total", "rank").values()) for name in ("hits", "lookups")
    )
    assert 0 < hits < lookups
    names = [path.name for path in sorted((run / "logs").iterdir())]
    assert names == [f"rank-000{rank}.jsonl" for rank in range(3)]
    last = (run / "logs" / "rank-0000.jsonl").read_text().splitlines()[-1]
    assert "rank 2 (store 0)" in json.loads(last)["message"]
    assert "rank 2 (store 0)" in " ".join(errors.split())
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
