"""Metrics within groups against direct computations, one group after the other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score, roc_auc_score

from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch, KeyedJaggedTensor
from rowhaul.train.ranking import BUCKETS, GroupedScores, RankingSums, check_grouped, check_metrics
from rowhaul.train.task_metrics import EvaluationMetrics
from slow_cases import mostly_slow

NAMES = ("gauc", "ndcg@3", "ndcg@10", "hr@1", "hr@3", "mrr", "mrr@2")


def draw(seed, count=3000, num_groups=200, levels=7):
    random = np.random.default_rng(seed)
    groups = random.integers(-num_groups, num_groups, count)
    scores = random.integers(0, levels, count).astype(np.float32) / 4 - 1  # many ties
    labels = (random.random(count) < 0.2 + 0.1 * scores).astype(np.float32)
    return groups, labels, scores


def direct(groups, labels, scores):
    """Sample by sample; a positive sample comes after the negative ones of its score."""
    sums, counts = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0)
    for group in np.unique(groups):
        mine, given = labels[groups == group], scores[groups == group]
        if 0 < mine.sum() < len(mine):
            sums["gauc"] += len(mine) * roc_auc_score(mine, given)
            counts["gauc"] += len(mine)
        if not mine.any():
            continue
        order = sorted(range(len(mine)), key=lambda place: (-given[place], mine[place]))
        rank = 1 + next(place for place, sample in enumerate(order) if mine[sample])
        for name in NAMES[1:]:
            kind, _, k = name.partition("@")
            k = int(k or 10**9)
            if kind == "ndcg":  # scikit-learn wants two samples
                gain = ndcg_score([mine], [given], k=k) if len(mine) > 1 else 1.0
            else:
                gain = (1.0 if kind == "hr" else 1 / rank) if rank <= k else 0.0
            sums[name] += gain
            counts[name] += 1
    return {name: sums[name] / counts[name] for name in NAMES}


def measured(groups, labels, scores, held_bytes=1 << 20, parts=1, order=None):
    grouped, sums = GroupedScores(held_bytes), RankingSums(NAMES)
    places = np.arange(len(groups)) if order is None else order
    for some in np.array_split(places, parts):
        grouped.add(groups[some], labels[some], scores[some])
    for number in range(BUCKETS):
        sums.add(grouped.bucket(number))
    return sums.values()


@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_metrics_are_those_of_each_group_by_itself(seed):
    data = draw(seed)
    assert measured(*data) == pytest.approx(direct(*data), rel=1e-12)


def test_groups_may_span_batches_in_any_order_and_go_to_files():
    data = draw(7)
    whole = measured(*data)
    mixed = np.random.default_rng(1).permutation(len(data[0]))
    assert measured(*data, parts=40, order=mixed) == whole
    assert measured(*data, held_bytes=500, parts=40, order=mixed) == whole  # all are spilled, many times


def test_a_constant_score_earns_nothing_but_half_an_auc():
    groups, labels, _ = draw(3)
    values = measured(groups, labels, np.zeros(len(groups), np.float32))
    assert values["gauc"] == 0.5
    assert values["hr@1"] == pytest.approx(
        np.mean([labels[groups == one].all() for one in np.unique(groups) if labels[groups == one].any()])
    )


def test_what_no_group_defines_is_nan():
    one = np.ones(4, np.float32)
    values = measured(np.arange(4), one, one)  # no group has both classes
    assert math.isnan(values["gauc"])
    assert values["mrr"] == 1
    assert all(map(math.isnan, measured(np.arange(4), one, one * np.nan).values()))


@pytest.mark.parametrize(("name", "near"), [("ngcd@10", "ndcg@10"), ("GAUC", "gauc"), ("hr@0", "hr@10")])
def test_unknown_metrics_are_refused_with_the_nearest(name, near):
    with pytest.raises(
        ConfigError, match=f"unknown metric '{name}' \\(did you mean '{near}'\\?\\); known are"
    ):
        check_metrics([name])


def test_metrics_that_would_not_be_measured_are_refused():
    number = {"name": "spent", "kind": "number"}
    schema = Schema.from_dict({"labels": [number, "click"], "group": "user", "ids": ["item"]})
    check_grouped(["gauc"], schema)
    for changed, message in (
        ({"group": ""}, "the schema names none"),
        ({"label": number}, "numbers .spent."),
    ):
        given = schema.to_dict() | changed
        if "label" in changed:
            del given["labels"]
        with pytest.raises(ConfigError, match=message):
            check_grouped(["gauc"], Schema.from_dict(given))
        check_grouped([], Schema.from_dict(given))


def test_metrics_may_be_computed_between_batches():
    schema = Schema.from_dict({"label": "click", "ids": ["item"], "group": "user"})
    watched, plain = EvaluationMetrics(schema), EvaluationMetrics(schema)
    for number in range(3):
        groups, labels, scores = draw(number, count=50, num_groups=4)
        ids = KeyedJaggedTensor(["item"], torch.arange(50), lengths=torch.ones(50, dtype=torch.int64))
        batch = Batch(
            torch.empty(50, 0), ids, torch.from_numpy(labels), torch.arange(50), 50,
            groups=torch.from_numpy(groups),
        )  # fmt: skip
        for metrics in (watched, plain):
            metrics.add(batch, torch.from_numpy(scores), number)
        watched.compute()
    assert watched.compute().in_groups == watched.compute().in_groups == plain.compute().in_groups
