"""What a reader gets: plain numbers for programs, a table, and a page that stands on its own."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from simulate_cases import links, outcome

from rowhaul.simulate.clock import ASSUMPTIONS
from rowhaul.simulate.report import render
from rowhaul.simulate.results import Results, describe_shares
from rowhaul.simulate.table import footnotes, label, moves_columns, time_columns

KINDS = ["miss_pull", "update_push", "evict_push", "peer_send"]


@pytest.fixture
def results():
    return Results(
        settings={"data": ["<logs>/*.parquet"], "workers": 2, "store_links": None},
        links=links((100.0, 10.0), (1000.0,)),
        outcomes=(
            outcome("laia", [0.2, 0.4]),
            outcome("laia@best-subset", [0.3, 0.0], shares=(8, 0)),
            outcome("joint", [0.1, 0.2], shares=(7, 1), dispatch="joint:objective=makespan"),
        ),
        reference="laia",
        assumptions=ASSUMPTIONS,
        notes=("The data holds 4 batches.",),
    )


def test_the_plain_form_has_every_field(results):
    plain = json.loads(json.dumps(results.to_dict()))
    assert plain["settings"]["workers"] == 2
    laia, subset, joint = plain["mechanisms"]
    assert [one["name"] for one in plain["mechanisms"]] == ["laia", "laia@best-subset", "joint"]
    for counts in (laia["rows"], laia["bytes"]):
        assert list(counts) == KINDS
        assert all(len(per_worker) == 2 for per_worker in counts.values())
    assert laia["rows"]["update_push"] == [2.0, 3.0]
    assert laia["iterations"] == 3
    assert laia["cost_seconds"] == pytest.approx(0.6)
    assert laia["slowest_link_seconds"] == pytest.approx(0.4)
    assert laia["iteration_seconds"] == pytest.approx(0.4)
    assert laia["hit_ratio"] == 0.25
    assert laia["decision_ms"]["median"] == pytest.approx(5 / 3)  # of the last three, without the warm-up
    assert laia["decision_ms"]["median"] < laia["decision_ms"]["p99"] <= 2.0
    assert laia["lookup_ms"] == {"median": 0.5, "p99": 0.5}
    assert (subset["workers_used"], subset["shares"]) == (1, [8, 0])
    assert joint["dispatch"] == "joint:objective=makespan"
    assert len(joint["series"]["cost_seconds"]) == 4


def test_columns_compare_with_the_reference(results):
    moves, times = moves_columns(results), time_columns(results)
    assert all(len(column.cells) == 3 for column in [*moves, *times])
    by_title = {" ".join(column.title): column.cells for column in [*moves, *times]}
    assert [cell.split() for cell in by_title["total cost ms    ±%"]] == [
        ["600", "–"],
        ["300", "-50%"],
        ["300", "-50%"],
    ]
    assert by_title["miss pulls"] == ["1", "1", "1"]


def test_bytes_moved_include_the_sums_of_replicated_rows(results):
    laia, subset, joint = results.outcomes
    moved = float(laia.bytes.sum())
    replicating = [replace(one, all_reduce_bytes=1e6) for one in (laia, subset, joint)]
    # Each of n workers sends 2(n-1)/n of the bytes; one alone sends nothing.
    assert [one.moved_bytes - moved for one in replicating] == [2e6, 0, 2e6]
    columns = moves_columns(replace(results, outcomes=tuple(replicating)))
    by_title = {" ".join(column.title): column.cells for column in columns}
    assert by_title["moved MB"][0] == "2.00"
    plain = replicating[0].to_dict()
    assert plain["bytes"] == laia.to_dict()["bytes"]
    assert plain["all_reduce"]["bytes"] == 1e6


def test_footnotes_say_who_trains_how_much(results):
    notes = " ".join(footnotes(results))
    assert "Samples per worker, joint: 7,1 (as joint:objective=makespan)" in notes
    assert "The data holds 4 batches." in notes
    assert "difference to laia" in notes
    assert [label(one) for one in results.outcomes] == ["laia", "best subset 1×8", "joint"]
    assert describe_shares([200] * 4 + [56] * 4) == "200*4,56*4"


def test_the_page_shows_every_mechanism_and_needs_nothing_else(results):
    page = render(results)

    class Checker(HTMLParser):
        opened, svgs = [], 0

        def handle_starttag(self, tag, attributes):
            self.svgs += tag == "svg"
            for name, value in attributes:
                assert name not in ("src",), "the page must not load anything"
                if name in ("href", "xlink:href"):
                    assert value.startswith("#"), value

    checker = Checker()
    checker.feed(page)
    assert checker.svgs == 4
    for outcome_ in results.outcomes:
        assert label(outcome_) in page
    for assumption in ASSUMPTIONS:
        assert assumption[:40] in page
    assert "&lt;logs&gt;" in page
    assert "<logs>" not in page
    assert not re.search(r"url\((?!#)", page)


def test_a_page_of_nothing_moving_can_be_drawn():
    still = outcome("laia", [0.0, 0.0])
    still.rows[:] = 0
    results = Results({}, links((1.0, 1.0)), (still,), "laia", ASSUMPTIONS)
    assert "laia" in render(results)


def test_a_footnote_says_where_training_would_wait_for_decisions(results):
    slow = replace(results, outcomes=(outcome("quick", [9.0, 1.0]), outcome("slow", [1e-4, 1e-5])))
    slow = replace(slow, reference="quick")
    (line,) = [line for line in footnotes(slow) if "training would wait" in line]
    assert line.startswith("Decisions of slow took longer")
    assert not any("training would wait" in line for line in footnotes(results))
