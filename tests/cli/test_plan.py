"""`rowhaul plan` as a person types it."""

import json
import sys
from html.parser import HTMLParser

import pytest

from rowhaul.cluster import launch

SMALL = ("--batch-size", "250", "--embedding-dim", "4", "--set", "model.options.top=[16]")
QUICK = ("--batches", "12", "--compute", "20us", "--cache", "10000")


@pytest.fixture
def plan(rowhaul, log_folder):
    def run(*arguments):
        code, out, err = rowhaul("plan", "--data", f"{log_folder}/*.parquet", *SMALL, *QUICK, *arguments)
        said = "\n".join(line for line in out.splitlines() if "━" not in line)  # without the bar
        return code, said, " ".join(err.split())

    return run


def test_the_first_line_is_advice_and_all_ways_are_shown(plan):
    code, out, _ = plan("--links", "10mbit", "--machines", "1,2,4")
    assert code == 0
    assert out.splitlines()[0].startswith("Stay with one machine: ")
    assert " would help." in out.splitlines()[0]
    for words in (
        "alone",
        "round-robin",
        "joint",
        "samples/s",
        "memory of each",
        "planning",
        "a sample: rows",
    ):
        assert words in out


def test_json_has_all_numbers_and_fast_links_pay(plan):
    links = ("--links", "100gbit", "--compute", "1ms")  # more than planning takes, which is measured
    code, out, _ = plan(*links, "--machines", "2", "--hot-rows", "20", "--dispatchers", "joint", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["machines"] == 2
    assert found["advice"].startswith("take two machines, with joint")
    assert [(one["machines"], one["hot_rows"]) for one in found["predictions"]] == [(1, 0), (2, 0), (2, 20)]
    for one in found["predictions"]:
        assert one["samples_per_second"] == pytest.approx(250 / one["seconds"])
        assert one["machine_bytes"] > 0
        assert one["fits"]
    plain, hot = found["predictions"][1:]
    assert hot["machine_bytes"] > plain["machine_bytes"]  # every machine holds the replicated rows, too


def test_a_configuration_says_how_many_rows_are_hot_and_who_trains_what(plan, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("cluster: {hot_rows: 20, dispatcher: laia}\n")
    two = ("--links", "1gbit", "--machines", "2", "--json")

    def ways(*more):
        code, out, err = plan(file, *two, *more)
        assert code == 0, err
        return {(one["dispatcher"], one["hot_rows"]): one for one in json.loads(out)["predictions"]}

    found = ways()
    assert set(found) == {("", 0)} | {
        (name, rows) for name in ("round-robin", "joint", "laia") for rows in (0, 20)
    }
    assert found["laia", 20]["machine_bytes"] > found["laia", 0]["machine_bytes"]
    assert set(ways("--dispatchers", "joint", "--hot-rows", "0")) == {("", 0), ("joint", 0)}
    assert set(ways("--dispatchers", "joint", "--sync", "static")) == {("", 0), ("joint", 20)}
    assert set(ways("--dispatchers", "joint", "--sync", "static", "--hot-rows", "5")) == {
        ("", 0),
        ("joint", 5),
    }


def test_hot_rows_that_only_training_can_choose_are_refused(plan):
    code, _, err = plan("--links", "1gbit", "--set", "cluster.hot_rows=auto")
    assert (code, "a prediction needs a number: give --hot-rows 10000, or 0 for none" in err) == (2, True)


@pytest.mark.slow
def test_pruned_rows_are_compared_with_whole_ones(plan):
    prune = ("--prune", "50%", "--set", "prune.chunks=2")
    code, out, _ = plan(
        "--links", "1mbit", "--machines", "2", "--dispatchers", "joint", "--hot-rows", "20", *prune, "--json"
    )
    assert code == 0
    found = {(one["machines"], one["hot_rows"], one["pruned"]): one for one in json.loads(out)["predictions"]}
    assert set(found) == {(1, 0, False), (1, 0, True), (2, 0, False), (2, 20, False), (2, 0, True)}
    assert found[2, 0, True]["row_bytes"] < found[2, 0, False]["row_bytes"]


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_said(plan):
    code, out, _ = plan("--links", "1gbit", "--machines", "1,2", "--memory", "1MiB")
    assert code == 0
    assert out.startswith("Not even 2 machines have enough memory")
    assert ": too much" in out


@pytest.mark.slow
def test_the_page_is_whole_and_needs_no_network(plan, tmp_path):
    code, _, _ = plan("--links", "1gbit*2,100mbit*2", "--machines", "2,4", "--out", tmp_path / "plan.html")
    assert code == 0
    text = (tmp_path / "plan.html").read_text()
    opened = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attributes):
            if tag not in ("meta", "link", "br"):
                opened.append(tag)
            for name, value in attributes:
                assert name != "src"
                assert name != "href" or value.startswith("#")

        def handle_startendtag(self, tag, attributes):
            pass

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Parser().feed(text)
    assert opened == []
    assert text.count("<svg") == 2
    assert "<h1>" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say how fast the machines' links are: --links 1gbit"),
        (["--links", "measure"], "--links measure needs the machines: start this under torchrun"),
        (["--links", "1gbit*2", "--machines", "1,4"], "--links 1gbit*2 names 2 machines, but there are 4"),
        (["--links", "1gbit", "--machines", "1,x"], "'x' must be a number of machines from 1 to 64"),
        (["--links", "1gbit", "--machines", "65"], "'65' must be a number of machines from 1 to 64"),
        (["--links", "1gbit", "--dispatchers", "best"], "best"),
        (["--links", "1gbit", "--batches", "3"], "--batches is 3; a prediction needs at least 8"),
        (["--links", "1gbit", "--out", "no/such/plan.html"], "no such folder"),
        (["--links", "1gbit", "--out", "."], "is a folder"),
        (["--links", "1gbit", "--out", __file__], "exists and is something else than this command writes"),
        (["--links", "1gbit", "--memory", "lots"], "--memory"),
        (["--links", "1gbit", "--dispatcher", "laia"], "no effect on a prediction"),
        (["--links", "1gbit", "--compute", "fast"], "--compute: 'fast' is not understood"),
        (["--links", "1gbit*2", "--compute", "0us"], "--compute is 0us; the time of a sample must be more"),
    ],
)
def test_bad_input_is_explained(plan, arguments, says):
    code, _, err = plan(*arguments)
    assert code == 2
    assert says in err


@pytest.mark.slow
def test_this_machine_is_measured(rowhaul, log_folder):
    """Real ranks train a little; what they take is more than nothing."""
    given = ["--data", f"{log_folder}/*.parquet", *SMALL, "--batches", "12", "--threads", "1"]
    code, out, err = rowhaul("plan", *given, "--links", "1gbit", "--machines", "2", "--json")
    assert code == 0, err
    first, *others = json.loads(out)["predictions"]
    assert first["compute_seconds"] > 0
    assert all(one["compute_seconds"] > 0 for one in others)


@pytest.mark.slow
def test_links_are_measured_on_the_machines_that_there_are(log_folder, tmp_path):
    out = tmp_path / "plan.html"
    given = ["--data", f"{log_folder}/*.parquet", *SMALL, *QUICK, "--links", "measure", "--out", str(out)]
    launch(["plan", *given], 2, colocated=True, command=[sys.executable, "-m", "rowhaul"])
    assert "2 machines" in out.read_text()
