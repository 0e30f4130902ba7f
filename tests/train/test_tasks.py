"""Several labels, masks, weights and groups: read, learned in parts, measured, predicted."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

from rowhaul.data.generate import LogGenerator
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, Trainer, train_run
from rowhaul.train.predict import predict_file

SCHEMA = {
    "labels": ["click", {"name": "conversion", "after": "click"}, {"name": "spent", "kind": "number"}],
    "weight": "importance",
    "group": "user",
    "dense": ["age"],
    "ids": ["item", "shop"],
}
ROWS = 600


def write_log(folder, **changed):
    random = np.random.default_rng(0)
    click = random.integers(0, 2, ROWS)
    columns = {
        "click": pa.array(click, mask=random.random(ROWS) < 0.1),
        "conversion": random.integers(0, 2, ROWS),
        "spent": pa.array(random.normal(size=ROWS), mask=random.random(ROWS) < 0.5),
        "importance": random.random(ROWS).astype(np.float32) * 3,
        "user": [f"user {one}" for one in random.integers(0, 30, ROWS)],
        "age": random.normal(size=ROWS),
        "item": random.integers(0, 40, ROWS),
        "shop": random.integers(0, 9, ROWS),
    }
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns | changed), path)
    return path


def config(**settings):
    model = {"name": "mmoe", "embedding_dim": 4, "options": {"hidden": [8], "tower": [4]}}
    return TrainConfig.from_dict({"model": model, "batch_size": 100, "precision": "float64", **settings})


def test_a_schema_of_several_labels_reads_back():
    schema = Schema.from_dict(SCHEMA)
    assert Schema.from_dict(schema.to_dict()) == schema
    assert [one.name for one in schema.tasks] == ["click", "conversion", "spent"]
    assert schema.features == ("item", "shop")
    assert "user" in schema.column_names()
    assert "user" not in schema.without_group().column_names()
    assert Schema.from_dict({"label": "click", "ids": ["item"]}).to_dict() == {
        "label": "click", "dense": [], "ids": ["item"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": "x"}, "both `label` and `labels` are given"),
        (
            {"labels": ["click", {"name": "b", "after": "clik"}]},
            "after 'clik', which must be one of the labels",
        ),
        ({"labels": [{"name": "click", "kind": "count"}]}, "unknown kind 'count'; known are binary, number"),
        ({"weight": 3}, "`weight` must be the name of a column, got 3"),
        ({"weight": "item"}, "the weight 'item' is an id column"),
    ],
)
def test_wrong_schemas_are_refused(changed, message):
    with pytest.raises(DataError, match=message):
        Schema.from_dict(SCHEMA | changed)


def test_missing_labels_and_those_without_a_click_are_nan(tmp_path):
    path = write_log(tmp_path)
    table = pq.read_table(path)
    (samples,) = SampleStream(path, Schema.from_dict(SCHEMA), ROWS)
    click, conversion, spent = samples.labels.T
    clicked = np.array([one == 1 for one in table["click"].to_pylist()])
    assert np.array_equal(np.isnan(click), np.array([one is None for one in table["click"].to_pylist()]))
    assert np.array_equal(~np.isnan(conversion), clicked)
    assert np.array_equal(conversion[clicked], table["conversion"].to_numpy()[clicked])
    assert np.isnan(spent).sum() == table["spent"].null_count
    assert len(np.unique(samples.groups)) == 30
    known = ~np.isnan(samples.labels)
    weights = samples.weights.astype(np.float64)
    weighted = [weights[of_task].sum() for of_task in known.T]
    assert samples.global_totals() == pytest.approx([weights.sum(), *known.sum(0), *weighted])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("importance", float("nan"), r"log.parquet, row 70 .*: weight 'importance' is nan; a finite number"),
        ("importance", None, "row 70 .*: weight 'importance' is None"),
        ("importance", -1.0, "row 70 .*: weight 'importance' is -1.0"),
        ("click", 2, "row 70 .*: label 'click' is 2; 0, 1 or nothing"),
        ("spent", float("inf"), "row 70 .*: label 'spent' is inf"),
        ("user", None, "row 70 .*: group 'user' is None"),
    ],
)
def test_values_that_cannot_be_learned_from_are_named(tmp_path, column, value, message):
    given = pq.read_table(write_log(tmp_path))[column].to_pylist()
    given[70] = value
    path = write_log(tmp_path, **{column: given})
    with pytest.raises(DataError, match=message):
        list(SampleStream(path, Schema.from_dict(SCHEMA), 100))


def direct_loss(trainer, samples, divide_by, weights):
    """Label by label, sample by sample, over the whole batch."""
    batch = Batch.from_samples(samples)
    with torch.no_grad():
        logits = trainer.model(batch).numpy()
    total = 0.0
    for task, name in enumerate(("click", "conversion", "spent")):
        summed = divisor = 0.0
        for place in range(len(samples)):
            label, logit = float(samples.labels[place, task]), logits[place, task]
            if np.isnan(label):
                continue
            weight = float(samples.weights[place])
            squared = (logit - label) ** 2
            entropy = np.log1p(np.exp(-logit)) if label == 1 else np.log1p(np.exp(logit))
            summed += weight * (squared if name == "spent" else entropy)
            divisor += {"labels": 1, "weights": weight, "batch": 0}[divide_by]
        total += weights.get(name, 1.0) * summed / (divisor or len(samples))
    return total


@pytest.mark.parametrize("divide_by", ["batch", "labels", "weights"])
def test_parts_of_a_batch_learn_what_the_whole_does(tmp_path, divide_by):
    schema = Schema.from_dict(SCHEMA)
    stream = SampleStream(write_log(tmp_path), schema, 150)
    given = {"loss": {"divide_by": divide_by, "weights": {"conversion": 0.5, "spent": 2}}}
    whole, parted = Trainer(config(**given), schema), Trainer(config(**given), schema)
    for samples in stream:
        expected = direct_loss(whole, samples, divide_by, given["loss"]["weights"])
        loss = whole.train_step(Batch.from_samples(samples))
        assert loss == pytest.approx(expected, rel=1e-6)
        workers = np.random.default_rng(len(samples)).integers(0, 3, len(samples))
        parts = [samples.take(np.flatnonzero(workers == one)) for one in (2, 0, 1)]
        batches = [Batch.from_samples(part, global_size=len(samples)) for part in parts]
        assert parted.train_parts(Batch.from_samples(samples), batches) == pytest.approx(loss, rel=1e-12)
    for one, other in zip(whole.model.parameters(), parted.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_mask_and_a_denominator_in_ones_own_loop(tmp_path):
    (samples,) = SampleStream(write_log(tmp_path), Schema.from_dict(SCHEMA), ROWS)
    batch = Batch.from_samples(samples)
    known = ~torch.isnan(batch.labels[:, 0])
    losses = batch.labels[:, 0] + 1  # NaN where the label is missing
    weighted = losses[known] @ batch.weights[known]
    assert batch.loss(losses, known, batch.weights) == pytest.approx(float(weighted) / ROWS, rel=1e-5)
    mean = batch.loss(losses, known, batch.weights, denominator=batch.totals.weighted[0])
    assert mean == pytest.approx(float(weighted / batch.weights[known].sum()), rel=1e-5)
    assert batch.loss(losses, torch.zeros_like(known), denominator=0) == 0
    with pytest.raises(DataError, match="mask needs one value per sample"):
        batch.loss(losses, known[:5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": {"weights": {"clck": 1}}},
            r"no label 'clck' \(did you mean 'click'\?\); the schema has click",
        ),
        ({"loss": {"weights": {"click": -1}}}, "the weight of 'click' must be 0 or more, got -1"),
        ({"loss": {"divide_by": "mean"}}, "loss.divide_by must be one of batch, labels, weights, got 'mean'"),
        ({"metrics": ["ndgc@5"]}, r"unknown metric 'ndgc@5' \(did you mean 'ndcg@10'\?\)"),
        ({"model": {"name": "dlrm"}}, "model 'dlrm' predicts one label, but the schema has 3 labels"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(config(**settings), Schema.from_dict(SCHEMA))


def test_a_run_measures_and_predicts_every_label(tmp_path):
    path, schema = write_log(tmp_path), Schema.from_dict(SCHEMA)
    run = tmp_path / "run"
    result = train_run(config(metrics=["gauc", "hr@2"]), schema, path, eval_data=path, out=run)
    metrics = result.metrics
    assert list(metrics.tasks) == ["click", "conversion", "spent"]
    assert predict_file(str(run), path, tmp_path / "scores.parquet", keep=["user"]) == ROWS
    scores = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    assert list(scores) == ["user", "score_click", "score_conversion", "score_spent"]
    (samples,) = SampleStream(path, schema, ROWS)
    for task, name in enumerate(("click", "conversion")):
        known, found = ~np.isnan(samples.labels[:, task]), np.array(scores[f"score_{name}"])
        expected = roc_auc_score(samples.labels[known, task], found[known])
        assert metrics.tasks[name]["auc"] == pytest.approx(expected, abs=1e-6)
        assert metrics.tasks[name]["num_samples"] == known.sum()
        positive = samples.labels[known, task].sum()
        assert metrics.tasks[name]["calibration"] == pytest.approx(found[known].sum() / positive, rel=1e-4)
        assert {"gauc", "hr@2"} <= metrics.tasks[name].keys()
    known = ~np.isnan(samples.labels[:, 2])
    errors = np.array(scores["score_spent"])[known] - samples.labels[known, 2]
    assert metrics.tasks["spent"]["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)
    assert metrics.auc == metrics.tasks["click"]["auc"]
    assert metrics.in_groups["gauc"] == metrics.tasks["click"]["gauc"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = next(line for line in lines if line["kind"] == "eval")
    assert logged["conversion/gauc"] == metrics.tasks["conversion"]["gauc"]


def test_esmm_is_measured_on_all_samples_and_refuses_other_divisors(tmp_path):
    schema = replace(
        Schema.from_dict(SCHEMA), labels=(LabelColumn("click"), LabelColumn("conversion", after="click"))
    )
    model = {"name": "esmm", "embedding_dim": 4, "options": {"hidden": [8]}}
    trainer = Trainer(config(model=model), schema)
    stream = SampleStream(write_log(tmp_path), schema, 200)
    metrics = trainer.evaluate(stream)
    assert metrics.tasks["conversion"]["num_samples"] == metrics.tasks["click"]["num_samples"]
    with pytest.raises(ConfigError, match="ESMM learns all labels from all samples; set it to batch"):
        Trainer(config(model=model, loss={"divide_by": "labels"}), schema)


def test_prepare_keeps_missing_labels_weights_and_the_group(tmp_path):
    (tmp_path / "log.csv").write_text("click,sale,w,user,item\n1,0,0.5,a,3\n0,,1,b,4\n1,1,2,a,5\n,1,1,c,5\n")
    given = {"labels": ["click", {"name": "sale", "after": "click"}], "weight": "w", "group": "user"}
    schema = Schema.from_dict({**given, "ids": ["user", "item"]})
    prepare(tmp_path / "log.csv", tmp_path / "data", "csv", schema=schema, test_share=0)
    (samples,) = SampleStream(tmp_path / "data", Schema.read(tmp_path / "data" / "schema.yaml"), 9)
    nan = np.nan
    np.testing.assert_array_equal(samples.labels, [[1, 0], [0, nan], [1, 1], [nan, nan]])
    np.testing.assert_array_equal(samples.weights, [0.5, 1, 2, 1])
    assert samples.groups[0] == samples.groups[2] != samples.groups[1]
    elsewhere = Schema.from_dict({**given, "ids": ["item"]})
    with pytest.raises(DataError, match="the group 'user' is not among `ids`"):
        prepare(tmp_path / "log.csv", tmp_path / "other", "csv", schema=elsewhere)


def test_generated_conversions_follow_clicks_and_leave_clicks_as_they_are():
    plain, both = LogGenerator("movielens", 2000), LogGenerator("movielens", 2000, conversions=True)
    (first,), (second,) = plain.batches(), both.batches()
    assert first["liked"].equals(second["liked"])
    clicks = second["liked"].to_numpy() == 1
    assert np.array_equal(second["conversion"].is_valid().to_numpy(zero_copy_only=False), clicks)
    assert 0.1 < np.nanmean(second["conversion"].to_numpy(zero_copy_only=False)[clicks]) < 0.5
    assert [one.name for one in both.schema.labels] == ["liked", "conversion"]


@pytest.mark.parametrize("divide_by", ["labels", "weights"])
def test_a_batch_made_by_hand_is_counted_and_a_part_of_one_refused(tmp_path, divide_by):
    schema = Schema.from_dict(SCHEMA)
    (samples,) = SampleStream(write_log(tmp_path), schema, ROWS)
    batch = Batch.from_samples(samples)
    losses = [
        Trainer(config(loss={"divide_by": divide_by}), schema).train_step(one)
        for one in (batch, replace(batch, totals=None))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    part = replace(batch, totals=None, global_size=2 * ROWS)
    with pytest.raises(DataError, match=r"600 of its 1,200 samples has no totals; give it those"):
        Trainer(config(loss={"divide_by": divide_by}), schema).train_step(part)


@pytest.mark.parametrize("labels", [SCHEMA["labels"], ["click"]], ids=["several", "one"])
@pytest.mark.parametrize("divide_by", ["batch", "labels", "weights"])
def test_a_batch_without_a_sample_has_no_loss_and_is_measured(tmp_path, labels, divide_by):
    schema = Schema.from_dict({**SCHEMA, "labels": labels})
    (samples,) = SampleStream(write_log(tmp_path), schema, ROWS)
    whole, empty = (
        Batch.from_samples(samples.take(np.arange(count)), global_size=count) for count in (ROWS, 0)
    )
    trainer = Trainer(config(loss={"divide_by": divide_by}), schema)
    assert trainer.train_step(replace(empty, totals=None)) == 0
    measured = []
    for batches in ([whole], [empty, whole, empty]):
        metrics = trainer.new_metrics()
        with torch.no_grad():
            for batch in batches:
                metrics.add(batch, trainer.model(batch))
        measured.append(metrics.compute())
    assert measured[0] == measured[1]
