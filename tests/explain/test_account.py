"""Lines of explain.jsonl: every byte of the traffic, rank by rank; timelines on one clock."""

import numpy as np
import pytest
from explain_cases import explained, facts, plans

from rowhaul.explain.account import Account
from rowhaul.explain.advice import advise, one_machine_text
from rowhaul.explain.explain_file import ExplainFile, read_lines
from rowhaul.explain.findings import PARTS, Findings
from rowhaul.explain.rank_report import RankReport, clock_shift
from rowhaul.explain.summary import summarise, waits_text
from rowhaul.schedule import Topology


def test_a_detail_has_every_byte_of_the_plans():
    found = list(plans(30))
    account = explained(30)
    detail = account.detail(30, final=True)
    rows = sum(plan.counts()[0].sum() for plan in found)
    num_bytes = sum(plan.counts()[1].sum() for plan in found)
    for name in ("links", "tables_moved"):
        assert sum(line[-2] for line in detail[name]) == rows
        assert sum(line[-1] for line in detail[name]) == num_bytes
    assert sum(line[-1] for line in detail["link_tables"]) == num_bytes
    totals = Findings(detail)
    assert totals.row_bytes * 30 == pytest.approx(num_bytes)
    assert sum(one.num_bytes for one in totals.by_table.values()) * 30 == pytest.approx(num_bytes)
    assert sum(one.num_bytes for _, one in totals.tables_by_cost) * 30 == pytest.approx(num_bytes)
    everything = sum(one.num_bytes for one in totals.by_link.values())
    assert everything == pytest.approx(totals.all_bytes)
    assert totals.dense_bytes == 6 * 1000
    # The seconds of links are divided among tables and kinds, none is lost.
    whole = sum(totals.link_seconds[link] for link in {key[:2] for key in totals.by_link if key[3]})
    assert sum(one.seconds for one in totals.by_link.values()) == pytest.approx(whole)
    assert sum(totals.table_seconds.values()) == pytest.approx(whole)
    assert sum(one.seconds for one in totals.by_table.values()) == pytest.approx(whole)


def test_intervals_add_up_to_the_detail():
    account, lines = Account(facts()), []
    for number, plan in enumerate(plans(30), 1):
        account.traffic.add(plan)
        if number % 7 == 0 or number == 30:
            lines.append(account.interval(number))
    detail = account.detail(30)
    assert sum(line["iterations"] for line in lines) == 30
    for name in ("hits", "lookups", "all_reduce_rows", "all_reduce_bytes"):
        assert sum(line[name] for line in lines) == detail[name]
    moved = {}
    for line in lines:
        for kind, reason, rows, num_bytes in line["moves"]:
            moved[kind, reason] = moved.get((kind, reason), 0) + np.array([rows, num_bytes])
    for kind, reason in moved:
        parts = [one[-2:] for one in detail["links"] if one[2:4] == [kind, reason]]
        assert moved[kind, reason].tolist() == np.sum(parts, axis=0).tolist()
    np.testing.assert_array_equal(np.sum([line["samples"] for line in lines], axis=0), detail["samples"])
    assert sum(one[-1] for one in detail["links"]) == sum(counts[1] for counts in moved.values())


def test_reports_survive_the_wire():
    before = explained(12).reports[2]
    after = RankReport.unpack(before.pack())
    assert after.iterations == before.iterations
    assert after.dense_bytes == before.dense_bytes
    assert after.seconds == pytest.approx(before.seconds, abs=1e-6)
    assert [span[:2] for span in after.spans] == [span[:2] for span in before.spans]


def test_times_of_another_machine_are_shifted_to_this_one():
    timeline = explained(20).timeline(20)
    assert timeline["iterations"] == [17, 18, 19]
    here = [one for one in timeline["spans"] if one[0] == 0 and one[2] == "compute"]
    there = [one for one in timeline["spans"] if one[0] == 2 and one[2] == "compute"]  # 5,000 s ahead
    assert len(here) == len(there) == 3
    for mine, theirs in zip(here, there, strict=True):
        assert mine[3:5] == pytest.approx(theirs[3:5], abs=2e-6)
    assert timeline["boundaries"] == pytest.approx([0, 0.024, 0.048, 0.072], abs=1e-5)


def test_a_clock_that_hardly_differs_is_the_same():
    assert clock_shift({1: 5.0, 2: 6.0}, {1: 5.001, 2: 6.003}) == 0
    assert clock_shift({1: 5.0, 2: 6.0, 3: 7.0}, {2: 106.0, 3: 107.0, 4: 1.0}) == -100
    assert clock_shift({1: 5.0}, {2: 1.0}) == 0


def test_advice_rests_on_what_was_counted():
    found = Findings(explained(30).detail(30))
    assert sum(found.composition[name] for name in PARTS) == pytest.approx(0.024)
    advice = {one.what: one for one in advise(found)}
    detail = found.detail
    total = sum(num_bytes for *_, num_bytes in detail["repulled"])
    # Three caches of 25 rows: as many more rows hold what came back within 25 evictions.
    near = sum(num_bytes for distance, _, num_bytes in detail["repulled"] if 1 << distance <= 25)
    assert 0 < near <= total
    factor = 2 if near >= 0.5 * total else 4
    assert f"{factor} times the cache" in advice["more cache"].text
    half = advice["dense gradients in half precision"]
    assert half.saves_seconds == pytest.approx(0.002)
    assert "2.9 KiB" in half.text
    assert advice["pruning"].saves_seconds == pytest.approx(0.003)
    saved = [one.saves_seconds for one in advise(found)]
    assert saved == sorted(saved, reverse=True)
    assert all(one.basis for one in advise(found))
    text = one_machine_text(found)
    assert "take 24 ms an iteration; one alone would take up to 27 ms" in text  # three times 9 ms


def test_what_the_run_refuses_is_not_advised():
    detail = explained(30).detail(30)
    said = {one.what for one in advise(Findings(detail))}
    refusing = {one.what for one in advise(Findings({**detail, "refused": ["--prune", "--row-dtype"]}))}
    assert said - refusing == {"pruning", "rows in half precision"}


def test_one_machine_is_advised_where_it_is_faster():
    account = explained(30)
    for one in account.reports[:3]:
        one.seconds["cpu"] = 0.004 * 30
    found = Findings(account.detail(30))
    assert "One worker alone would take about 12 ms an iteration, these 3 workers take 24 ms" in (
        one_machine_text(found)
    )
    best = advise(found)[0]
    assert best.what == "one machine"
    assert best.saves_seconds == pytest.approx(0.012)


def test_a_summary_names_ranks_tables_and_reasons():
    text = dict(summarise(explained(30).detail(30)))
    assert text["step 30"].startswith("24 ms an iteration: compute 42%")
    assert "item <b>" in text["tables"]
    assert "another worker trained it" in text["rows, why"]
    assert "1.5 ms an iteration" in text["waited for"]


def test_workers_without_a_share_are_named_and_their_waits_are_not_counted():
    account = explained(30)
    usual = Findings(account.detail(30))
    seconds = {"plan": 0.02 * 30, "rows": 0.0}
    account.reports[2] = RankReport(0, 30, {}, {}, {0: 0.3}, {}, {1: 900})
    found = Findings(account.detail(30))
    assert found.left_out == {2: 1.0}
    assert found.training == [0, 1]
    assert found.composition == pytest.approx(usual.composition)
    assert found.link_seconds[0, 2] == pytest.approx(0.01)
    text = dict(summarise(account.detail(30)))
    assert text["left out"] == "worker 2 in 100% of iterations"
    assert "these 2 workers" in text["one machine"].lower()
    assert not any("Without worker 2" in one.text for one in advise(found))

    account.reports[2] = RankReport(10, 20, {"compute": 0.1, **seconds}, {0: 0.1})
    found = Findings(account.detail(30))
    assert found.left_out == {2: pytest.approx(2 / 3)}
    assert found.composition["plan"] == pytest.approx((2 * 0.03 + 0.6) / 70)
    assert "left out" not in dict(summarise(explained(30).detail(30)))


def test_waits_count_as_often_as_a_worker_took_part():
    account = explained(30)
    account.reports[1] = RankReport(100, 0, {}, {0: 1.0})
    account.reports[2] = RankReport(1, 99, {}, {0: 5.0})  # a long wait at the beginning, then no share
    found = Findings(account.detail(30))
    assert found.training == [0, 1]
    assert found.waited_for(0) == pytest.approx(6.0 / 101)


def test_a_worker_left_out_still_sends_the_rows_that_it_stores():
    account = explained(30, topology=Topology(num_workers=3, colocated=True))
    for one in account.reports[:3]:
        one.waited[2] = 0.9 * 30
    found = Findings(account.detail(30))
    sent = [(kind, size) for source, _, kind, _, _, size in found.detail["links"] if source == 2]
    stored = sum(size for kind, size in sent if kind == "miss_pull") / sum(size for _, size in sent)
    assert 0 < stored < 1
    assert found.stored_share(2) == pytest.approx(stored)
    (advice,) = (one for one in advise(found) if one.what == "fewer workers")
    assert "Without worker 2" in advice.text
    assert advice.saves_seconds == pytest.approx(0.9 * (1 - stored) - 0.005)
    assert f"{stored:.0%} of whose bytes it would still send" in advice.basis


def test_a_run_without_iterations_has_a_summary():
    account = Account(facts())
    account.reports = [RankReport(0) for _ in range(5)]
    ((step, text),) = summarise(account.detail(0))
    assert (step, text.startswith("nothing is measured yet")) == ("step 0", True)
    assert waits_text(Findings(account.detail(0))) == ""
    assert advise(Findings(account.detail(0))) == []
    assert account.timeline(0) is None


def test_a_resumed_run_drops_the_lines_that_it_will_repeat(tmp_path):
    file = ExplainFile(tmp_path, 0)
    for step in (20, 40, 60):
        file.append({"kind": "interval", "step": step})
    file.close()
    with (tmp_path / "explain.jsonl").open("a") as lines:
        lines.write('{"kind": "inter')  # killed meanwhile
    resumed = ExplainFile(tmp_path, 40)
    resumed.append({"kind": "interval", "step": 50})
    resumed.close()
    assert [line["step"] for line in read_lines(tmp_path / "explain.jsonl")] == [20, 40, 50]
