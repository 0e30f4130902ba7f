"""The page, the alerts and the dashboard name metrics that exist, and the page names all of them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from scraping import collected

from rowhaul.monitoring.monitor import RankLabels
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.runtime.runtime import MEASURES

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\b(?:rowhaul|process)_[a-z_]*[a-z]\b")


@pytest.fixture(scope="module")
def known():
    """Names of all metrics of a cluster, as they are asked for."""
    monitor = RunMonitor()
    monitor.joined([RankLabels(0, "worker", "a")], ["user"], MEASURES, lambda: None)
    types = collected(monitor).types
    ours = {name + ("_total" if kind == "counter" else "") for name, kind in types.items()}
    process = {
        sample.name
        for family in ProcessCollector(registry=CollectorRegistry()).collect()
        for sample in family.samples
    }
    return ours, process


def expressions():
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_shows_metrics_that_exist(known):
    assert len(expressions()) > 10
    for title, expression in expressions():
        names = set(NAME.findall(expression))
        assert names, title
        assert names <= known[0] | known[1], title


def test_the_dashboard_can_be_imported():
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not covered & cells, panel["title"]
        cells |= covered
    assert all(expression.count("(") == expression.count(")") for _, expression in expressions())


def test_the_page_names_every_metric_and_no_other(known):
    page = (DOCS / "operations.md").read_text()
    # A row lists `rowhaul_evaluation_auc`, `_log_loss` and so on.
    short = {f"rowhaul_evaluation{name}" for name in re.findall(r"`(_[a-z_]+)`", page) if name != "_total"}
    named = set(NAME.findall(page)) | short
    assert {name for name in named if name.startswith("rowhaul_")} == known[0]
    assert {name for name in named if name.startswith("process_")} <= known[1]


def test_the_alerts_of_the_page_are_rules_over_metrics_that_exist(known):
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (DOCS / "operations.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (rules,) = [yaml.safe_load(block)["groups"][0]["rules"] for block in blocks if "groups:" in block]
    for rule in rules:
        names = set(NAME.findall(rule["expr"]))
        assert names <= known[0] | known[1], rule["alert"]
        assert names or "up{" in rule["expr"]
