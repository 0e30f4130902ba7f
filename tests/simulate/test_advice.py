"""One sentence says what to do, from modelled iterations; comparisons that say nothing new are left out."""

from dataclasses import replace

import numpy as np
import pytest
from simulate_cases import links, outcome

from rowhaul.simulate.advice import advice, without_repeats
from rowhaul.simulate.results import Results


def one(name, iteration, compute, shares=(50, 50)):
    found = outcome(name, [iteration, iteration])
    per_worker = np.array([compute * share for share in shares])
    return replace(
        found,
        shares=shares,
        compute_seconds=per_worker,
        alone_seconds=compute * sum(shares),
        iteration_series=np.full(len(found.cost_series), iteration),
    )


def said(*outcomes):
    return advice(Results({}, links((1.0, 1.0)), outcomes, outcomes[0].name, ()))


def test_more_workers_are_advised_only_if_they_beat_one_machine():
    # 100 samples of 1 ms take one machine 0.1 s.
    assert said(one("random", 0.2, 1e-3), one("joint", 0.06, 1e-3)) == (
        "Advice: use joint on all 2 workers: 60 ms an iteration, 1.7 times as fast as one machine alone "
        "(100 ms)."
    )
    assert said(one("random", 0.2, 1e-3), one("joint", 0.15, 1e-3)) == (
        "Advice: use one machine if it holds the tables: about 100 ms an iteration alone. If it does not, "
        "use joint on all 2 workers: 150 ms an iteration."
    )


def test_a_subset_is_named_by_its_workers():
    text = said(one("laia", 0.09, 1e-3), one("laia@best-subset", 0.05, 1e-3, (0, 100)))
    assert "laia on 1 of 2 workers (1)" in text


def test_unequal_shares_and_the_dispatcher_that_ran_are_named():
    found = replace(one("joint", 0.05, 1e-3, (70, 30)), dispatch="joint:objective=makespan")
    assert "use joint:objective=makespan on all 2 workers with --shares 70,30: 50 ms" in said(found)
    assert "--shares" not in said(one("joint", 0.05, 1e-3, (34, 33, 33)))


def test_without_compute_nothing_is_said_of_how_many():
    text = said(one("laia", 0.09, 0.0))
    assert text.startswith("Advice: transfers take least time with laia on all 2 workers.")  # not: send least
    assert text.endswith("cannot be said without compute (--compute).")


def test_one_machine_alone_is_the_fastest_of_all_not_only_of_those_with_a_share():
    # Worker 0 would take 10 ms alone; the best line trains on worker 1.
    fast_idles = replace(one("laia@best-subset", 0.05, 1e-3, (0, 100)), alone_seconds=0.01)
    assert said(one("laia", 0.2, 1e-3), fast_idles).startswith("Advice: use one machine")
    no_compute = replace(fast_idles, alone_seconds=0.0)
    assert "about 0 ms an iteration alone" in said(one("laia", 0.2, 1e-3), no_compute)


@pytest.mark.parametrize("reference", ["laia", "laia@best-subset"])
def test_a_best_subset_of_all_workers_is_left_out_unless_others_are_compared_with_it(reference):
    outcomes = (
        one("laia", 0.1, 0.0),
        one("laia@best-subset", 0.1, 0.0),
        one("joint", 0.1, 0.0),
        one("joint@best-subset", 0.1, 0.0, (0, 100)),
    )
    kept = [found.name for found in without_repeats(outcomes, reference)]
    first = ["laia"] if reference == "laia" else ["laia", "laia@best-subset"]
    assert kept == [*first, "joint", "joint@best-subset"]
