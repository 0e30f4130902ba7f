"""The port: what it answers, what it refuses, and that nothing of it is left."""

import json
import socket
import threading
import urllib.request

import pytest
from scraping import get, scrape

from rowhaul.errors import ConfigError
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.monitoring.server import MetricsServer, check_port
from rowhaul.monitoring.settings import MonitoringConfig

FREE = MonitoringConfig(metrics_port="0")


def port_of(server):
    return int(server.url.rpartition(":")[2].partition("/")[0])


def test_pages():
    with MetricsServer(FREE, RunMonitor()) as server:
        where = f"http://127.0.0.1:{port_of(server)}"
        assert server.url == f"{where}/metrics"
        shown = scrape(port_of(server))
        assert shown["rowhaul_healthy"] == 1
        assert shown["process_resident_memory_bytes"] > 0
        status, body = get(f"{where}/healthz?verbose")
        assert (status, json.loads(body)["phase"]) == (200, "starting")
        assert get(f"{where}/")[0] == 200
        assert get(f"{where}/nothing")[0] == 404
        head = urllib.request.Request(f"{where}/metrics", method="HEAD")
        with urllib.request.urlopen(head, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert answer.read() == b""
        modern = urllib.request.Request(
            f"{where}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(modern, timeout=20) as answer:
            assert answer.read().endswith(b"# EOF\n")


def test_an_unhealthy_run_answers_503():
    settings = MonitoringConfig(metrics_port="0", stalled_after=1e-9)
    with MetricsServer(settings, RunMonitor()) as server:
        status, body = get(f"http://127.0.0.1:{port_of(server)}/healthz")
        assert status == 503
        assert "no progress for 0 s while starting" in json.loads(body)["reason"]
        assert scrape(port_of(server))["rowhaul_healthy"] == 0


def test_the_port_is_free_again_and_the_thread_is_gone():
    before = set(threading.enumerate())
    with MetricsServer(FREE, RunMonitor()) as server:
        port = port_of(server)
        scrape(port)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)  # one that answered a request may be about to end
        assert not thread.is_alive()
    check_port(MonitoringConfig(metrics_port=str(port)))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_silent_clients_are_few_and_do_not_keep_the_port():
    with MetricsServer(FREE, RunMonitor()) as server:
        silent = [socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) for _ in range(40)]
        turned_away = 0
        for client in silent[16:]:  # the first sixteen are waited for
            turned_away += client.recv(1) == b""
        assert turned_away == 24
    for client in silent:
        client.close()
    check_port(MonitoringConfig(metrics_port=str(port_of(server))))


def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics port {port} of 127.0.0.1 is in use"):
            check_port(MonitoringConfig(metrics_port=str(port)))


@pytest.mark.parametrize("address", ["203.0.113.7", "no such host"])
def test_an_address_of_another_machine_is_refused(address):
    with pytest.raises(ConfigError, match=f"'{address}' is no address of this machine"):
        check_port(MonitoringConfig(metrics_port="0", metrics_address=address))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics_port": "-1"}, "port from 1 to 65535"),
        ({"metrics_port": "70000"}, "port from 1 to 65535"),
        ({"metrics_port": "http"}, "port from 1 to 65535"),
        ({"metrics_address": " "}, "metrics_address is empty"),
        ({"stalled_after": 0.0}, "more than 0 seconds"),
        ({"stalled_after": float("nan")}, "more than 0 seconds"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ConfigError, match=message):
        MonitoringConfig(**given)
