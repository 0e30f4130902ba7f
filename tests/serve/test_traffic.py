"""Rates and times of requests, from what all processes have counted; what a run says of itself."""

import math

import numpy as np
import pytest

from rowhaul.publishing.quality import TrainingRecord
from rowhaul.serve.metrics import ServeMetrics
from rowhaul.serve.traffic import Counts, History, counts_of, quantile_seconds
from rowhaul.serve.training_file import TRAINING_FILE, read_windows

EDGES = (0.001, 0.005, 0.01, 0.05, math.inf)


def counts(seconds, edges=EDGES):
    seconds = np.asarray(seconds)
    return Counts(requests=len(seconds), buckets=tuple((one, float((seconds <= one).sum())) for one in edges))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_quantile_lies_in_the_bucket_of_the_true_one(share):
    random = np.random.default_rng(3)
    before, since = random.exponential(0.02, 300), random.exponential(0.004, 900)
    found = quantile_seconds(counts(before), counts([*before, *since]), share)
    true = np.quantile(since, share, method="inverted_cdf")
    place = np.searchsorted(EDGES, true)
    assert (0, *EDGES)[place] <= found <= EDGES[place]
    # With narrow buckets it is the true one.
    edges = (*np.arange(0.0001, 0.1, 0.0001), math.inf)
    found = quantile_seconds(counts(before, edges), counts([*before, *since], edges), share)
    assert found == pytest.approx(true, abs=0.0002)


def test_no_request_has_no_time():
    assert quantile_seconds(counts([0.1]), counts([0.1]), 0.5) is None
    assert quantile_seconds(Counts(), Counts(), 0.5) is None
    assert quantile_seconds(counts([]), counts([9.0]), 0.5) == 0.05  # beyond the largest bucket


def test_samples_have_rates_over_the_last_seconds():
    metrics, step = ServeMetrics(), iter(range(100))
    history = History(lambda: counts_of(metrics.collect()), lambda: (next(step), 1.5))
    history.sample(100)
    for number in range(40):
        metrics.began()
        metrics.ended(200 if number % 4 else 422, 0.004)
        metrics.scored(5, 5, 0)
    history.sample(102)
    (first, second) = history.since(0)
    assert (first["requests_per_second"], first["p50_ms"], first["step"]) == (0.0, None, 0)
    assert (second["requests_per_second"], second["errors_per_second"]) == (20.0, 5.0)
    assert second["candidates_per_second"] == 100.0
    assert 3 < second["p50_ms"] <= second["p99_ms"] <= 5
    assert history.since(100) == [second]
    for number in range(6):
        history.sample(104 + 2 * number)
    assert history.since(112)[0]["requests_per_second"] == 0.0


def test_a_run_says_how_good_it_is(tmp_path):
    assert read_windows(tmp_path) == []
    record = TrainingRecord(tmp_path)
    record.scored(10, {"auc": 0.7, "calibration": math.nan})
    record.scored(20, {"auc": 0.75, "calibration": 1.0})
    assert [(one["step"], one["calibration"]) for one in read_windows(tmp_path)] == [(10, None), (20, 1.0)]
    TrainingRecord(tmp_path).scored(14, {"auc": 0.5})  # of a run that was killed, and resumed at step 12
    assert [(one["step"], one["auc"]) for one in read_windows(tmp_path)] == [(10, 0.7), (14, 0.5)]
    (tmp_path / TRAINING_FILE).write_text("{")
    assert read_windows(tmp_path) == []
