"""The page of a server, in a real browser."""

import re
import shutil
import threading
import time

import httpx
import pytest
from browser import CHROMIUM, MISSING, look
from server_process import BODY, start, stop, wait_for, wait_until_up

from rowhaul.publishing import quality
from rowhaul.publishing.quality import TrainingRecord
from rowhaul.serve.traffic import EVERY_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


def text_of(dom, name):
    return re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)[1]


def stats_of(url):
    return httpx.get(f"{url}/stats", timeout=30).json()


def shows_requests(url, since):
    found = [one for one in stats_of(url)["samples"] if one["time"] > since]
    return any(one["requests_per_second"] > 1 and one["p99_ms"] is not None for one in found)


def test_a_browser_shows_how_fresh_good_and_fast_a_server_is(served_run, tmp_path, monkeypatch):
    folder = tmp_path / "served"
    shutil.copytree(served_run[1], folder)
    record, began = TrainingRecord(folder), time.time() - 60
    for number in range(1, 6):
        monkeypatch.setattr(quality.time, "time", lambda ended=began + 10 * number: ended)
        values = {"auc": 0.7 + number / 100, "log_loss": 0.5, "calibration": 1.02, "num_samples": 20_000}
        record.scored(number, values)
    monkeypatch.undo()
    process, url = start(folder, "--workers", "2", "--page")
    asking, ended = threading.Event(), threading.Event()

    def ask():
        while not ended.is_set():
            with httpx.Client() as client:  # a new connection: any process may get it
                client.post(f"{url}/score", json=BODY, timeout=30).raise_for_status()
            asking.set()
            time.sleep(0.02)

    thread = threading.Thread(target=ask, daemon=True)
    try:
        wait_until_up(url)
        thread.start()
        wait_for(lambda: asking.is_set() and stats_of(url)["processes"] == 2, "two processes serve")
        # The next one is missed by a process that has just begun, and the first has nothing to compare with.
        since = stats_of(url)["now"] + 2 * EVERY_SECONDS
        wait_for(lambda: shows_requests(url, since), "samples show requests")
        stats = stats_of(url)
        for width, dark in ((1200, False), (1200, True), (390, False)):
            dom, picture = look(f"{url}/page", tmp_path, width=width, height=1500, dark=dark)
            assert picture.stat().st_size > 10_000
        assert int(re.search(r'data-polls="(\d+)"', dom)[1]) > 1  # it goes on asking
        assert text_of(dom, "state") == "live"
        assert text_of(dom, "auc") == "0.7500"
        assert float(text_of(dom, "requests").replace(",", "")) > 1
        assert re.fullmatch(r"[\d.]+ / [\d.]+ ms", text_of(dom, "times"))
        assert text_of(dom, "rows") == f"{stats['rows']:,}"
        for chart in ("auc-chart", "fresh-chart", "requests-chart", "times-chart"):
            drawn = re.search(rf'<svg id="{chart}".*?</svg>', dom, re.DOTALL)[0]
            lines = {"times-chart": 2, "fresh-chart": 0}.get(chart, 1)
            assert drawn.count("<polyline") == lines, drawn
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', dom)
    finally:
        ended.set()
        thread.join(30)
        code, _ = stop(process)
    assert code == 0
