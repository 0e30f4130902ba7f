"""Labels: their rate, the best AUC that anything can reach, and that learning gets near it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss, roc_auc_score

from rowhaul.data.generate import LogGenerator, preset_names
from rowhaul.data.generate.bayes import BayesMeter
from rowhaul.data.generate.labels import LEARNABLE_IDS, LabelModel
from slow_cases import mostly_slow


@pytest.mark.parametrize("seed", mostly_slow([0, 1], 0))
@pytest.mark.parametrize(
    ("preset", "rate", "auc"),
    [
        ("criteo", 0.256, (0.79, 0.82)),
        ("criteo-tb", 0.034, (0.78, 0.85)),
        ("criteo-search", 0.105, (0.79, 0.85)),
        ("avazu", 0.17, (0.72, 0.78)),
        ("movielens", 0.575, (0.75, 0.80)),
        ("taobao", 0.0514, (0.72, 0.78)),
    ],
)
def test_base_rate_and_bayes_auc_of_every_seed(preset, rate, auc, seed):
    facts = LogGenerator(preset, 150_000, seed).bayes
    assert facts.base_rate == pytest.approx(rate, rel=0.06)
    assert auc[0] < facts.auc < auc[1]
    assert 0.7 < facts.normalised_entropy < 0.95


@pytest.mark.parametrize("preset", mostly_slow(preset_names(), "criteo", "movielens"))
def test_bayes_facts_are_those_of_the_true_probabilities(preset):
    generator = LogGenerator(preset, 70_000)
    samples = list(generator.samples())
    labels = np.concatenate([one.labels for one in samples])
    probabilities = np.concatenate([one.probabilities for one in samples])
    rate = labels.mean()
    assert generator.bayes.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-5)
    assert generator.bayes.log_loss == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
    assert generator.bayes.base_rate == rate
    assert generator.bayes.normalised_entropy == pytest.approx(
        generator.bayes.log_loss / log_loss(labels, np.full(len(labels), rate)), rel=1e-9
    )
    assert LogGenerator(preset, 70_000).bayes == generator.bayes


def test_labels_follow_the_probabilities():
    samples = next(LogGenerator("criteo", 65_536).samples())
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        some = (samples.probabilities >= low) & (samples.probabilities < high)
        error = 4 * 0.5 / np.sqrt(some.sum())
        assert samples.labels[some].mean() == pytest.approx(samples.probabilities[some].mean(), abs=error)


def test_a_meter_of_one_class_has_no_auc():
    meter = BayesMeter()
    meter.add(np.array([0.2, 0.9]), np.array([True, True]))
    facts = meter.facts()
    assert np.isnan(facts.auc)
    assert np.isnan(facts.normalised_entropy)
    assert facts.base_rate == 1.0
    assert facts.log_loss == pytest.approx(-(np.log(0.2) + np.log(0.9)) / 2)


@pytest.mark.parametrize(
    ("preset", "least"), mostly_slow([("criteo", 0.75), ("avazu", 0.71), ("taobao", 0.68)], ("avazu", 0.71))
)
def test_a_linear_model_learns_most_of_it_and_nothing_from_shuffled_labels(preset, least):
    rows, train = 200_000, 170_000
    features, labels = one_hot(preset, rows)
    shuffled = np.random.default_rng(0).permutation(labels)
    assert held_out_auc(features, labels, train) > least
    assert held_out_auc(features, shuffled, train) == pytest.approx(0.5, abs=0.02)


def one_hot(preset: str, rows: int, size: int = 1 << 20) -> tuple[csr_matrix, np.ndarray]:
    """Ids and bucketed numbers, hashed into one-hot columns."""
    generator = LogGenerator(preset, rows)
    positions, labels = [], []
    for batch in generator.batches():
        labels.append(batch.column(generator.schema.label.name).to_numpy())
        keys = [batch.column(name).fill_null(-1).to_numpy() for name in generator.schema.features]
        for dense in generator.schema.dense:
            numbers = batch.column(dense.name).fill_null(-1.0).to_numpy()
            keys.append(np.floor(2 * np.log1p(np.maximum(numbers, -0.9))).astype(np.int64))
        hashed = [(key * 1_000_003 + place * 7_919) % size for place, key in enumerate(keys)]
        positions.append(np.stack(hashed, axis=1))
    columns = np.concatenate(positions)
    starts = np.arange(0, columns.size + 1, columns.shape[1])
    return csr_matrix((np.ones(columns.size), columns.ravel(), starts), (rows, size)), np.concatenate(labels)


def held_out_auc(features: csr_matrix, labels: np.ndarray, train: int) -> float:
    model = SGDClassifier(loss="log_loss", alpha=2e-6, max_iter=3, tol=None, average=True, random_state=0)
    model.fit(features[:train], labels[:train])
    return float(roc_auc_score(labels[train:], model.decision_function(features[train:])))


@pytest.mark.parametrize("rare_signal", [False, True])
def test_rare_ids_matter_where_they_shall(rare_signal):
    generator = LogGenerator("criteo", 65_536, rare_signal=rare_signal)
    columns = next(generator.samples()).columns
    others = [np.where(ranks > LEARNABLE_IDS, ranks + 1, ranks) for ranks in columns.ranks]
    labels = LabelModel(generator.preset, seed=0, rare_signal=rare_signal)
    change = labels.scores(replace(columns, ranks=others)) - labels.scores(columns)
    changed = change[np.any([a != b for a, b in zip(others, columns.ranks, strict=True)], axis=0)]
    assert len(changed) > 30_000
    assert (changed.std() > 0.3) == rare_signal
    assert changed.any() == rare_signal


def test_a_log_whose_rare_ids_carry_signal_has_the_same_ids_and_base_rate():
    plain, rare = (LogGenerator("criteo", 65_536, rare_signal=one) for one in (False, True))
    for one, other in zip(
        next(plain.samples()).columns.ranks, next(rare.samples()).columns.ranks, strict=True
    ):
        assert (one == other).all()
    assert rare.bayes.base_rate == pytest.approx(plain.bayes.base_rate, rel=0.06)
    assert 0.79 < rare.bayes.auc < 0.82
