"""The page: well-formed, complete, without a byte from the network, whatever the run has left."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from explain_cases import explained, write_run

from rowhaul.errors import ConfigError
from rowhaul.explain.findings import Findings
from rowhaul.report import plots
from rowhaul.report.page import render
from rowhaul.report.reading import read_run
from rowhaul.report.tables import by_link, by_reason, by_table, costly_tables
from rowhaul.report.words import missing, sentences, tiles

VOID = {"meta", "br", "link", "img", "input", "hr"}
NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")


class Page(HTMLParser):
    """Checks that elements are nested, and collects what a test asks for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.plots, self.headings, self.ids = [], [], [], [], []
        self.text = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        for name in ("src", "href", "xlink:href", "action", "poster", "data"):
            value = given.get(name) or "#"
            assert value.startswith("#"), f"{tag} loads {value}"
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        self.tags.append(tag)
        if "data-plot" in given:
            self.plots.append(given["data-plot"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"{tag} was not open"
        assert self.open[-1] == tag, f"{tag} ends within {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style",):
            self.text.append(data)
            if self.open[-1] == "h2":
                self.headings.append(data)


def page_of(folder):
    text = render(read_run(folder))
    addresses = set(re.findall(r"[a-z]+://[^\s\"'<)]+", text))
    assert addresses <= set(NAMESPACES)
    assert not re.search(r"@import|url\((?!#)", text)
    return Page(text), text


def test_a_cluster_with_explain_has_everything(tmp_path):
    page, text = page_of(write_run(tmp_path / "run"))
    assert page.plots == ["composition", "bytes_over_time", "hit_ratio", "shares", "loss", "metrics", "speed"]
    wanted = [
        *("One iteration", "Over time", "The five tables that cost most", "What would help"),
        *("Who waited for whom", "Links", "Why rows move"),
        *("By link, kind and reason", "By table, kind and reason"),
    ]
    assert page.headings == wanted
    words = " ".join(page.text)
    assert "item <b>" in words  # names are escaped
    assert "<b>" not in text.replace("<div><b>", "")
    for one in (
        "worker 2 → store 0",
        "another worker trained it",
        "evicted",
        "split",
        "dense sum",
        "control",
    ):
        assert one in words
    assert 'class="timeline"' in text
    assert text.count("<svg") == 8


def test_the_words_come_first(tmp_path):
    _, text = page_of(write_run(tmp_path / "run"))
    first = text.index("dlrm trained on 3 workers and 2 stores, 30 steps and 720 samples")
    assert first < text.index("<svg")
    assert "AUC 0.7500" in text


def test_a_run_without_explain_says_what_is_missing(tmp_path):
    folder = write_run(tmp_path / "run", explain=False)
    page, text = page_of(folder)
    assert page.plots == ["measured_parts", "bytes_over_time", "hit_ratio", "loss", "metrics", "speed"]
    assert "Train with --explain to see it." in text
    assert "One iteration" not in page.headings


def test_one_process_has_its_loss_and_its_time(tmp_path):
    folder = write_run(tmp_path / "run", cluster=False)
    page, _ = page_of(folder)
    assert page.plots == ["loss", "metrics", "speed"]
    seconds = {"compute": 0.03, "data": 0.01}
    ranks = [{"iterations": 30, "seconds": {name: 30 * one for name, one in seconds.items()}}]
    lines = [
        {"kind": "interval", "step": 30, "iterations": 30, "ranks": ranks},
        {"kind": "detail", "step": 30, "final": True, "iterations": 30, "seconds": seconds},
    ]
    (folder / "explain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, text = page_of(folder)
    assert page.plots == ["composition", "loss", "metrics", "speed"]
    assert "On average 40 ms an iteration: compute 75%, waiting for data 25%. One process" in text


def test_an_unfinished_run_shows_what_there_is(tmp_path):
    folder = write_run(tmp_path / "run", final=False)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"kind": "train", "st')  # killed
    assert not read_run(folder).is_finished
    page, text = page_of(folder)
    assert "this page shows what there is up to step 30" in text
    assert "loss" in page.plots


def test_a_run_that_went_on_without_explain_has_finished(tmp_path):
    folder = write_run(tmp_path / "run", final=False)
    with (folder / "metrics.jsonl").open("a") as lines:
        line = {"kind": "train", "step": 60, "loss": 0.1, "samples_per_second": 1.0, "samples": 1440}
        lines.write(json.dumps(line) + "\n")
    run = read_run(folder)
    assert run.is_finished
    assert missing(run) == [
        "Tables and advice are of the time to step 30: later steps were trained without --explain."
    ]
    page_of(folder)


def test_a_run_that_went_on_with_more_ranks_is_drawn_from_there(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "explain.jsonl").read_text().splitlines()]
    before = {**lines[0], "step": 15, "samples": [12, 12], "ranks": lines[0]["ranks"][:2]}
    lines[1]["first_step"] = 15
    (folder / "explain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (before, *lines)))
    run = read_run(folder)
    for figure in (plots.shares(run), plots.composition(run)):
        (axis,) = figure.axes
        assert max(line.get_xdata().max() for line in axis.lines) == 30 if axis.lines else True
    assert [one["step"] for one in run.latest_intervals] == [30]
    page_of(folder)


def test_a_run_with_one_line_can_be_drawn(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"kind": "train", "step": 1, "loss": 0.7, "samples_per_second": 0.0, "samples": 10}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page, _ = page_of(folder)
    assert page.plots == ["loss"]
    evaluation = {"kind": "eval", "step": 1, "auc": None, "log_loss": 0.5}  # of samples of one class
    lines = [line, {**line, "step": 2, "loss": None}, evaluation]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    page, text = page_of(folder)
    assert page.plots == ["loss", "metrics"]
    assert "log loss 0.5000" in text


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; give the --out"):
        read_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(ConfigError, match="has logged nothing yet"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="is a file, not the folder of a run"):
        read_run(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text("seed: [0\n")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ConfigError, match="is not YAML"):
        read_run(tmp_path)


def test_many_ranks_are_not_all_drawn(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "explain.jsonl").read_text().splitlines()]
    timeline = lines[-1]
    timeline["roles"] = [f"worker {rank}" for rank in range(20)]
    timeline["hosts"] = ["a"] * 20
    timeline["spans"] += [[15, "training", "wait for rows", 0.0, 0.07, 3, 1]]
    (folder / "explain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, text = page_of(folder)
    assert "12 ranks that wait less are left out" in text
    assert ">worker 15<" in text


def test_tables_show_rows_that_seldom_move_and_no_seconds_that_nobody_measured():
    detail = explained(30).detail(30)
    often, seldom = (Findings({**detail, "iterations": count}) for count in (30, 30_000))
    for make in (by_link, by_table, by_reason, costly_tables):
        assert "<td>0.0</td>" not in make(seldom)
        assert "0.00 ms" not in make(often)
    for line in re.findall("<tr>(.*?)</tr>", by_link(often)):
        if ">dense sum<" in line or ">control<" in line:
            assert line.endswith("<td></td>")
    assert " 0%" not in costly_tables(often)


def test_sentences_do_not_depend_on_a_page(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert sentences(run)[1].startswith("These 3 workers take 24 ms an iteration")
    assert missing(run) == []


def test_one_worker_is_not_called_several(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    run.detail["num_workers"], run.detail["roles"] = 1, ["worker 0", "store 0"]
    assert sentences(run)[0].startswith("dlrm trained on 1 worker and 1 store, 30 steps")


def test_the_first_interval_is_drawn_from_its_beginning(tmp_path):
    figure = plots.composition(read_run(write_run(tmp_path / "run")))
    (axis,) = figure.axes
    compute = axis.collections[0].get_paths()[0].get_extents()
    assert (compute.x0, compute.x1) == (0, 30)
    assert compute.y1 == pytest.approx(10)  # ms, of an iteration


def test_a_label_that_is_a_number_has_an_rmse(tmp_path):
    folder = write_run(tmp_path / "run", cluster=False, explain=False)
    nothing = dict.fromkeys(("auc", "log_loss", "normalised_entropy"), math.nan)
    line = {"kind": "eval", "step": 30, **nothing, "spent/rmse": 1.25, "unknown_by_feature": {}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(folder)
    assert "; RMSE of spent 1.2500." in sentences(run)[0]
    assert ("1.2500", "RMSE of spent") in tiles(run)
    assert [one.get_label() for one in plots.metrics(run).axes[0].get_lines()] == ["RMSE of spent"]
