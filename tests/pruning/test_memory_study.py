"""The memory study picks and judges as it says, and keeps to the bytes it compares by."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import pruning_methods.runs as runs
from memory_study.contenders import FAMILIES, OURS, budget, family_of, name_of
from memory_study.drawing import draw
from memory_study.judging import Study, verdicts
from memory_study.writing import opening, picking_table, verdict_table
from pruning_methods.affording import affordable, index_bytes, mixed_dims
from pruning_methods.methods import ADAEMBED, BUDGET, FIITED, HASHING, MIXED, UNIFORM, UNPRUNED, Case
from pruning_methods.runs import Result, Run
from pruning_methods.sampler import BudgetExceededError, Sampler
from rowhaul.errors import ConfigError
from rowhaul.optim import RowwiseAdagrad
from rowhaul.store.index import KeyIndex

SHARES = (0.5, 0.1)
PICKING, JUDGING = [100, 101], [0, 1, 2]
LUCKY, STEADY = Case(HASHING, dim=4, share=0.1), Case(HASHING, dim=8, share=0.1)


def result(auc, used_bytes):
    return replace(Result.refusal(""), auc=auc, log_loss=1 - auc, used_bytes=used_bytes)


def made_up_results():
    """Unpruned 0.80; a lucky contender that is best where it is picked, and worse where it is judged."""
    aucs = {
        Case(UNPRUNED): (0.80, 0.80, 1000),
        Case(UNIFORM, dim=8): (0.7995, 0.7995, 450),
        Case(UNIFORM, dim=1): (0.74, 0.74, 200),
        LUCKY: (0.79, 0.76, 100),
        STEADY: (0.78, 0.78, 100),
        Case(FIITED, share=0.1): (0.795, 0.795, 101),  # a byte too many
        budget(SHARES)[0]: (0.801, 0.801, 480),
        budget(SHARES)[1]: (0.785, 0.785, 99),
    }
    found = {}
    for case, (picked, judged, used_bytes) in aucs.items():
        for seed in PICKING + JUDGING:
            auc = (picked if seed in PICKING else judged) + 0.001 * seed % 0.01
            found[Run("rare", 1000, seed, case)] = result(auc, used_bytes)
    found[Run("rare", 1000, 0, Case(ADAEMBED, share=0.1))] = Result.refusal("too few bytes")
    return found


def test_the_best_contender_is_picked_within_the_bytes_and_judged_on_other_seeds():
    study = Study.of("rare", made_up_results())
    wide, narrow = verdicts(study, PICKING, JUDGING, budget(SHARES))
    assert wide.best == Case(UNIFORM, dim=8)
    assert narrow.best == LUCKY  # that it was luck is for the judging seeds to show
    judged = study.on(JUDGING)
    assert judged.difference(narrow.ours, narrow.best).mean == pytest.approx(0.785 - 0.76)
    assert judged.change(wide.best).mean == pytest.approx(-0.0005)
    assert judged.share(narrow.ours) == pytest.approx(0.099)
    assert Case(ADAEMBED, share=0.1) not in study.by_case


def test_nothing_is_judged_before_it_is_run():
    results = {run: one for run, one in made_up_results().items() if run.seed in PICKING}
    study = Study.of("rare", results)
    assert [(one.ours, one.best) for one in verdicts(study, PICKING, JUDGING, budget(SHARES))] == [
        (None, None)
    ] * 2


def test_the_page_says_what_was_measured(tmp_path):
    study = Study.of("rare", made_up_results())
    found = verdicts(study, PICKING, JUDGING, budget(SHARES))
    picked, judged = study.on(PICKING), study.on(JUDGING)
    text = opening([(picked, judged, found)])
    assert "Rows of 8 are enough: -0.05 ± 0.00 points with 45 % of the bytes." in text
    assert "better at 50 %, 10 %" in text
    table = verdict_table(judged, found)
    assert (
        "| 10 % | -1.50 ± 0.00 | 9.9 % | hashing, rows of 4 | -4.00 ± 0.00 | 10 % | +2.50 ± 0.00 |" in table
    )
    assert "FIITED" not in picking_table(picked, (0.1,)).splitlines()[2]
    assert draw([picked], tmp_path / "frontier.png").stat().st_size > 10_000


def test_families_have_their_cases_and_every_case_a_name_of_its_own():
    for family, cases in FAMILIES.items():
        found = cases(SHARES)
        assert {family_of(case) for case in found} == {family}
        assert len({(name_of(case), case.share) for case in found}) == len(found) == len(set(found))
    assert {case.method for case in FAMILIES[OURS](SHARES)} == {BUDGET}


@pytest.mark.parametrize("counts", [[3, 200, 2500], [9000, 40_000, 700]])
def test_index_bytes_are_those_of_an_index(counts):
    index = KeyIndex(len(counts))
    starts = np.concatenate([[0], np.cumsum(counts)])
    keys = np.random.default_rng(0).integers(1 << 62, size=starts[-1])
    locations, num_absent = index.find(keys, starts)
    index.insert(keys, starts, locations, num_absent, np.arange(len(keys)))
    assert index.allocated_bytes <= index_bytes(np.array(counts)) <= 1.05 * index.allocated_bytes


def test_the_most_that_can_be_paid_for_is_found():
    assert affordable(lambda kept: 1000 * kept + 7, 257) == pytest.approx(0.25)
    with pytest.raises(ConfigError, match="the budget is 5"):
        affordable(lambda kept: 1000 * kept + 7, 5)


def test_mixed_dimensions_keep_to_the_bytes():
    num_rows, num_reads = np.array([10, 3000, 20_000]), np.full(3, 60_000)
    dims = mixed_dims(num_rows, num_reads, 32, RowwiseAdagrad(lr=0.1), 1_500_000)
    used = 4 * (np.array(dims) + 1) @ num_rows + index_bytes(num_rows)
    assert 1_000_000 < used <= 1_500_000


def test_runs_keep_to_their_share_of_the_unpruned_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    monkeypatch.setattr("pruning_methods.logs.CACHE", tmp_path / "data")
    whole = runs.Run("criteo", 6000, 0, Case(UNPRUNED))
    cases = [
        Case(UNIFORM, dim=4),
        Case(HASHING, dim=8, share=0.25),
        Case(MIXED, share=0.5),
        Case(ADAEMBED, chunks=1, utility="access", share=0.25),
    ]
    for run in [whole, *(replace(whole, case=case) for case in cases)]:
        runs.train_and_keep(run)
    unpruned = runs.known_result(whole)
    for case in cases:
        one = runs.known_result(replace(whole, case=case))
        assert not one.refused, (case, one.refused)
        share = one.used_bytes / unpruned.used_bytes
        assert 0.1 < share <= (case.share or 0.4), case
    # Through the configuration; what ever holds more than its budget has no result, however little more.
    ours = runs.train_and_keep(replace(whole, case=budget([0.5])[0]))[1]
    if ours.refused:
        assert "bytes are held" in ours.refused
    else:
        assert 0.1 < max(ours.used_bytes, ours.peak_bytes) / unpruned.used_bytes <= 0.5
    refused = runs.train_and_keep(replace(whole, case=Case(MIXED, share=0.05)))[1]
    assert "the budget is" in refused.refused
    assert math.isnan(refused.auc)


def test_a_byte_above_the_budget_is_noticed():
    sampler = Sampler(None, budget=100)
    sampler.look(100, batch=None)
    with pytest.raises(BudgetExceededError, match="101 bytes are held, 100 are allowed"):
        sampler.look(101, batch=None)
    assert sampler.peak_bytes == 101


def test_after_the_deadline_no_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    wanted = [runs.Run("criteo", 3000, 0, Case(HASHING, dim=8, share=0.25))]
    assert runs.results_of(wanted, 1, lambda *_: None, deadline=0.0) == {}
