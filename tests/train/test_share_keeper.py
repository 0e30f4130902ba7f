"""How shares are chosen: from measured pairs of ranks to links, and by trying candidates in training."""

from types import SimpleNamespace

import numpy as np
import pytest

from rowhaul.exchange.calibrate import LinkMeasurements
from rowhaul.exchange.runtime import MEASURES
from rowhaul.schedule import Topology
from rowhaul.train.distributed import shares


def pairs(own):
    """What pairs of ranks with such links would be measured at."""
    own = np.array(own, float)
    speeds = np.minimum(own[:, None], own[None, :])
    np.fill_diagonal(speeds, np.inf)
    return LinkMeasurements(np.zeros_like(speeds), speeds, speeds)


def test_workers_are_as_fast_as_their_pairs_with_the_store_and_the_store_as_all_of_them():
    found = shares._own_speeds(pairs([50, 50, 5, 500]), Topology(3, 1))
    assert found == (50, 50, 5, 105)


def test_a_slow_store_is_not_taken_for_slow_workers():
    found = shares._own_speeds(pairs([50, 50, 5, 10]), Topology(3, 1))
    assert found == (50, 50, 5, 10)


def test_seconds_per_sample_of_an_idle_worker_are_those_of_the_others():
    one = np.zeros((3, len(MEASURES)))
    one[:, MEASURES.index("compute")] = [0.2, 0.4, 0.0]
    one[:, MEASURES.index("samples")] = [10, 10, 0]
    assert shares.seconds_per_sample([one, one]) == pytest.approx((0.02, 0.04, 0.03))


def test_the_quickest_candidate_stays(monkeypatch):
    """Every candidate is timed in training once it is in force; the quickest one stays."""
    monkeypatch.setattr(
        shares, "candidates", lambda *given: [outcome((4, 4)), outcome((8, 0)), outcome((6, 2))]
    )
    clock = [0.0]
    monkeypatch.setattr(shares.time, "perf_counter", lambda: clock[0])
    posted, told = [], []
    postbox = SimpleNamespace(post=lambda name, value: posted.append((name, value)))
    settings = SimpleNamespace(dispatcher="joint", topology=Topology(2, 1))
    training = SimpleNamespace(settings=settings, runtime=SimpleNamespace(postbox=postbox))
    links = shares.MeasuredLinks((1.0, 1.0, 2.0), (0.0, 0.0, 0.0))
    keeper = shares.ShareKeeper(training, list, links, told.append)
    in_force, due = (4, 4), []
    seconds = {(4, 4): 3.0, (8, 0): 1.0, (6, 2): 2.0}
    for _ in range(200):
        clock[0] += seconds[in_force]
        keeper.observe(job(in_force))
        if keeper._thread is not None:
            keeper._thread.join()
        due.append(posted[-1][1] if posted else in_force)
        in_force = due[-3] if len(due) > 2 else in_force  # a record is in force two iterations later
    assert [value for _, value in posted] == [(4, 4), (8, 0), (6, 2), (8, 0)]
    assert keeper.decided
    assert in_force == (8, 0)
    assert "shares [8, 0] with joint: 1000.0 ms" in told[0]


def outcome(given):
    return SimpleNamespace(shares=given, dispatch="joint")


def job(given):
    measures = np.ones((3, len(MEASURES)))
    worker = np.repeat(np.arange(len(given)), given)
    return SimpleNamespace(measures=measures, plan=SimpleNamespace(worker=worker, num_workers=len(given)))
