"""Reading a metrics port as Prometheus does."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rowhaul.monitoring.collector import RunCollector
from rowhaul.monitoring.health import check_health


class Scrape(dict):
    """Values by metric name and labels; one value of a metric without labels by its name."""

    def __init__(self, text):
        self.types = {}
        for family in text_string_to_metric_families(text):
            self.types[family.name] = family.type
            assert family.documentation
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                assert key not in self, f"{key} is there twice"
                self[key] = sample.value

    def __getitem__(self, key):
        return super().__getitem__((key,) if isinstance(key, str) else key)

    def by(self, name, *labels):
        """The values of a metric by these labels."""
        return {
            tuple(dict(key[1:])[label] for label in labels): value
            for key, value in self.items()
            if key[0] == name
        }


def collected(monitor):
    """What a monitor would show, without a server."""
    registry = CollectorRegistry()
    registry.register(RunCollector(monitor, lambda: check_health(monitor, 60)))
    return Scrape(generate_latest(registry).decode())


def get(url):
    """Status and body of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(port):
    return Scrape(get(f"http://127.0.0.1:{port}/metrics")[1])


def health(port):
    status, body = get(f"http://127.0.0.1:{port}/healthz")
    return status, json.loads(body)


def wait_for(ask, seconds=100):
    """Ask until the answer is true; a server that is not there yet is no answer."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if answer := ask():
                return answer
        except OSError:
            pass
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
