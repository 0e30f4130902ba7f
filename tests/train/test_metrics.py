"""Metrics against scikit-learn, and where they are not defined."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.metrics import log_loss as sklearn_log_loss

from rowhaul.errors import DataError
from rowhaul.train.log import TrainingLog
from rowhaul.train.metrics import (
    BinaryMetrics,
    accuracy,
    auc,
    binary_values,
    log_loss,
    normalised_entropy,
)


@st.composite
def labelled_logits(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Both classes, and either few distinct logits (many ties) or any."""
    size = draw(st.integers(2, 80))
    few = st.sampled_from([-2.0, -0.0, 0.0, 0.5, 30.0])
    any_number = st.floats(-50, 50, width=32)
    logits = draw(hnp.arrays(np.float32, size, elements=draw(st.sampled_from([few, any_number]))))
    labels = draw(hnp.arrays(np.uint8, size, elements=st.integers(0, 1)))
    labels[0], labels[1] = 0, 1
    return labels, logits


@given(labelled_logits())
def test_auc_and_accuracy_equal_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    labels, logits = case
    assert auc(labels, logits) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert accuracy(labels, logits) == accuracy_score(labels, logits > 0)


@given(labelled_logits())
def test_log_loss_and_normalised_entropy_equal_scikit_learns(case: tuple[np.ndarray, np.ndarray]) -> None:
    labels, logits = case
    logits = logits.clip(-15, 15)  # beyond that the oracle's 1 - probability loses digits
    expected = sklearn_log_loss(labels, 1.0 / (1.0 + np.exp(-logits.astype(np.float64))))
    at_base_rate = sklearn_log_loss(labels, np.full(len(labels), labels.mean()))
    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-8)
    assert normalised_entropy(labels, logits) == pytest.approx(expected / at_base_rate, rel=1e-8)


@given(labelled_logits(), st.lists(st.integers(0, 80), max_size=4))
def test_metrics_do_not_depend_on_how_samples_are_batched(
    case: tuple[np.ndarray, np.ndarray], cuts: list[int]
) -> None:
    labels, logits = case
    whole, parts = BinaryMetrics(), BinaryMetrics()
    whole.update(labels, logits)
    for label_part, logit_part in zip(
        np.split(labels, sorted(cuts)), np.split(logits, sorted(cuts)), strict=True
    ):
        parts.update(label_part, logit_part)
    assert parts.compute() == whole.compute()


def test_auc_counts_pairs_won_and_half_of_the_ties() -> None:
    assert auc(np.array([0, 0, 1, 1]), np.array([1.0, 2.0, 2.0, 3.0])) == 3.5 / 4


def test_extreme_logits_cost_what_they_should() -> None:
    labels, logits = np.array([1, 0, 1, 0]), np.array([-1000.0, 1000.0, 1000.0, -1000.0])
    assert log_loss(labels, logits) == 500.0
    assert log_loss(np.array([1, 0]), np.array([math.inf, -math.inf])) == 0.0


def test_tensors_of_any_shape_and_type_are_taken() -> None:
    metrics = BinaryMetrics()
    metrics.update(
        torch.tensor([0.0, 1.0]), torch.tensor([[-1.0], [2.0]], dtype=torch.bfloat16, requires_grad=True)
    )
    metrics.update([True], [0.5])
    values = metrics.compute()
    assert (values.auc, values.accuracy, values.num_samples) == (1.0, 1.0, 3)
    assert values.base_rate == pytest.approx(2 / 3)


def test_later_changes_to_a_batch_do_not_reach_the_metrics() -> None:
    labels, logits = np.array([0, 1], np.uint8), np.array([-1, 1], np.float32)
    metrics = BinaryMetrics()
    metrics.update(labels, logits)
    logits[:] = -logits
    labels[:] = 0
    assert metrics.compute().auc == 1.0


@pytest.mark.parametrize(
    ("labels", "logits", "note"),
    [
        ([], [], "no samples"),
        ([1, 1], [0.5, 2.0], "both classes, all 2 labels are 1"),
        ([0, 1], [math.nan, 1.0], "returned NaN"),
    ],
)
def test_an_undefined_auc_is_nan_with_the_reason(labels: list[int], logits: list[float], note: str) -> None:
    metrics = BinaryMetrics()
    metrics.update(labels, logits)
    values = metrics.compute()
    assert math.isnan(values.auc)
    assert math.isnan(values.normalised_entropy)
    assert note in values.note


def test_batches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DataError, match="2 labels do not match 1 logits"):
        BinaryMetrics().update([0, 1], [0.5])
    with pytest.raises(DataError, match="must be 0 or 1"):
        BinaryMetrics().update([0.5], [0.5])


def test_what_is_not_defined_is_null_in_the_log(tmp_path):
    nan = math.nan
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "eval", "step": 1, "auc": NaN}\n'
    )  # of earlier versions
    with TrainingLog(tmp_path, 1, 1) as log:
        log.evaluation(2, binary_values(np.zeros(3), np.zeros(3)))
        log.write("train", 3, {"loss": nan}, ranks=[{"seconds": nan, "steps": 2}])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    first, evaluation, step = map(json.loads, text.splitlines())
    assert first["auc"] is evaluation["auc"] is step["loss"] is None
    assert evaluation["log_loss"] == pytest.approx(math.log(2))
    assert step["ranks"] == [{"seconds": None, "steps": 2}]
