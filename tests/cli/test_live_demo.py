"""`rowhaul demo --live`: everything at once, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rowhaul.cli.live.demo import summary


@pytest.mark.slow
def test_a_live_demo_learns_publishes_and_serves_until_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "rowhaul", "demo", "--live", "--events", "1500", "--seconds", "500"]
    demo = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    lines, url = [], None
    try:
        for line in demo.stdout:
            lines.append(line)
            url = url or (re.search(r"(http://\S+)/page", line) or [None, None])[1]
            if re.search(r"AUC 0\.\d+, knows events .* requests/s, p99 .* [1-9]\d* deltas", line):
                break
        assert url is not None, "".join(lines)
        assert httpx.get(f"{url}/page", timeout=30).status_code == 200
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        assert len(children) == 2  # a trainer and a server
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=300)
        assert demo.returncode == 0, rest
        assert re.search(r"AUC 0\.\d+, knows events [\d.]+ s old, \d+ requests/s, p99 [\d.]+ ms", rest)
        assert not any(Path(f"/proc/{one}").exists() for one in children)
        assert not list(tmp_path.glob("rowhaul-*"))  # PyTorch leaves caches of its own
    finally:
        demo.kill()


def test_numbers_that_are_not_there_yet_are_not_invented():
    nothing = {"windows": [{"auc": None}], "newest_event": None, "samples": []}
    stats = {**nothing, "now": 5.0, "deltas": 0, "rows": 7}
    expected = "no AUC yet, nothing learned yet, no requests yet, 0 deltas, 7 rows"
    assert summary(stats) == expected


def test_bad_numbers_are_refused(rowhaul):
    code, _, error = rowhaul("demo", "--live", "--seconds", "-1")
    assert code == 2
    assert "--seconds must be at least 0" in " ".join(error.split())
