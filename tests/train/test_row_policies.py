"""Rows come and go alike in one process and on a cluster, before and after a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from checkpointed_ranks import CLUSTER, CONFIG, STEPS, Session, contents, largest_difference, same_bits
from rowhaul.checkpoint import CheckpointReader
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.nn import Batch
from rowhaul.schedule.plan import RowCounts
from rowhaul.train import TrainConfig, snapshot, train_run
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.trainer import Trainer

TABLES = {
    "default": {"admit_after": 2},
    "user": {"ttl": 2, "max_rows": 60, "evict": "lfu"},
    "item": {"admit_after": 1, "max_rows": 25},
}


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    config = replace(CONFIG, tables=TABLES, log_every=3)
    return replace(Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema), config=config)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, session):
    """The run of one process: its folder and its result."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, train_run(session.config, session.schema, session.data, out=folder)


def test_a_cluster_trains_and_forgets_what_one_process_does(alone, session, tmp_path):
    replace(session, cluster=replace(CLUSTER, cache="80", peer_to_peer=True)).on_threads(tmp_path / "a")
    expected, found = contents(alone[0]), contents(tmp_path / "a")
    assert expected.keys() == found.keys()
    assert largest_difference(expected, found) < 1e-9


def test_everything_that_a_policy_can_do_happens_here_and_is_counted(alone, session):
    folder, result = alone
    counts = result.row_counts
    assert min(counts.admitted, counts.gradients_dropped, counts.expired, counts.over_limit) > 10
    tables = CheckpointReader(folder / CHECKPOINTS / f"step-{STEPS:09d}").tables
    assert tables["item"].num_rows == 25
    assert tables["user"].num_rows <= 60
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["kind"] == "tables"]
    assert [line["step"] for line in logged] == [3, 6, 9, 12]
    assert sum(line["rows/expired"] for line in logged) == pytest.approx(counts.expired / 3)
    assert sum(line["rows/gradients_dropped"] for line in logged) == pytest.approx(
        counts.gradients_dropped / 3
    )


def test_averages_after_resuming_are_of_the_steps_since(session, tmp_path):
    config, schema, data, out = session.config, session.schema, session.data, tmp_path / "run"
    asked = iter(range(1, STEPS))
    train_run(config, schema, data, out=out, should_stop=lambda: next(asked) == 5)
    counts = train_run(config, schema, data, out=out, resume=True).row_counts
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["rows/admitted"] for line in lines if line["kind"] == "tables"}
    assert (6 - 5) * logged[6] + 3 * logged[9] + 3 * logged[12] == pytest.approx(counts.admitted)


@pytest.mark.parametrize("after", [{"workers": 2, "stores": 2}, {"workers": 4, "colocated": True}], ids=str)
def test_another_cluster_knows_of_rows_what_the_one_before_did(after, alone, session, tmp_path):
    """Sightings, last uses and counts: without any of them other rows would be there."""
    session.interrupted(tmp_path / "a", at=5, cluster=replace(CLUSTER, **after))
    expected, found = contents(alone[0]), contents(tmp_path / "a")
    assert expected.keys() == found.keys()
    assert largest_difference(expected, found) < 1e-9


def test_one_process_goes_on_from_a_cluster_and_the_other_way_round(alone, session, tmp_path):
    config, schema, data = session.config, session.schema, session.data
    expected = contents(alone[0])
    stopping = iter(range(1, 100))
    train_run(config, schema, data, out=tmp_path / "b", should_stop=lambda: next(stopping) >= 5)
    replace(session, resume=True).on_threads(tmp_path / "b")
    assert expected.keys() == contents(tmp_path / "b").keys()
    assert largest_difference(expected, contents(tmp_path / "b")) < 1e-9

    replace(session, save_at=[5]).on_threads(tmp_path / "c")
    train_run(config, schema, data, out=tmp_path / "c", resume=True)
    assert expected.keys() == contents(tmp_path / "c").keys()
    assert largest_difference(expected, contents(tmp_path / "c")) < 1e-9


def test_one_process_resumes_to_the_same_bits(alone, session, tmp_path):
    config, schema, data = session.config, session.schema, session.data
    stopping = iter(range(1, 100))
    train_run(config, schema, data, out=tmp_path / "a", should_stop=lambda: next(stopping) >= 7)
    train_run(config, schema, data, out=tmp_path / "a", resume=True)
    assert same_bits(contents(alone[0]), contents(tmp_path / "a"))


def test_rows_of_a_checkpoint_without_policies_are_all_known(session, tmp_path):
    """As if they had just been named: none expires at once, and none has to be admitted again."""
    plain = replace(session.config, tables={})
    train_run(replace(plain, max_steps=5), session.schema, session.data, out=tmp_path / "a")
    trainer = Trainer(replace(plain, tables={"default": {"admit_after": 99, "ttl": 2}}), session.schema)
    snapshot.restore(trainer, tmp_path / "a" / CHECKPOINTS / "step-000000005")
    names = [one.name for one in trainer.collection.embedding_bag_configs()]
    before = {name: trainer.collection.num_rows(name) for name in names}
    stream = SampleStream(session.data, session.schema, 64, start=trainer.samples)
    batches = iter(stream)
    trainer.train_step(Batch.from_samples(next(batches)))
    assert {name: trainer.collection.num_rows(name) for name in names} == before
    trainer.train_step(Batch.from_samples(next(batches)))
    after = {name: trainer.collection.num_rows(name) for name in names}
    assert all(0 < after[name] < before[name] for name in names if before[name] > 64)
    assert trainer.lifecycle.counts.expired == sum(before.values()) - sum(after.values())


def test_rows_that_are_not_admitted_are_not_stored_and_do_not_learn(session):
    trainer = Trainer(replace(session.config, tables={"default": {"admit_after": 10**6}}), session.schema)
    stream = SampleStream(session.data, session.schema, 64)
    trainer.train_step(Batch.from_samples(next(iter(stream))))
    assert all(
        trainer.collection.num_rows(one.name) == 0 for one in trainer.collection.embedding_bag_configs()
    )
    assert trainer.lifecycle.counts == RowCounts(gradients_dropped=trainer.lifecycle.counts.gradients_dropped)


def test_configurations_say_it_by_table(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("tables: {default: {admit_after: 2}, user: {ttl: 10000, max_rows: 1000000, evict: lfu}}")
    config = TrainConfig.read(path)
    config.write(tmp_path / "again.yaml")
    assert TrainConfig.read(tmp_path / "again.yaml") == config
    user, item = config.row_policies(["user", "item"])
    assert (user.admit_after, user.ttl, user.max_rows, user.evict) == (2, 10_000, 1_000_000, "lfu")
    assert (item.admit_after, item.ttl, item.max_rows) == (2, None, None)


def test_settings_of_earlier_versions_are_understood():
    old = TrainConfig.from_dict({"cluster": {"workers": 2, "admit_after": 3}})
    assert old.tables == {"default": {"admit_after": 3}}
    assert TrainConfig.from_dict({"cluster": {"admit_after": 1}}).tables == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tables": {"user": {"ttl": 0}}}, "tables.user: ttl must be a whole number"),
        ({"tables": {"user": {"evict": "fifo"}}}, "evict must be lru or lfu"),
        ({"tables": {"default": 3}}, "tables.default: expected settings by name"),
        ({"tables": 3}, "tables: expected dict"),
        (
            {"tables": {"default": {"ttl": 3}}, "cluster": {"hot_rows": "auto"}},
            "would depend on measured times",
        ),
    ],
)
def test_wrong_settings_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        TrainConfig.from_dict(given)


def test_an_unknown_table_is_refused_before_anything_is_trained(session):
    with pytest.raises(ConfigError, match="there is no such table; did you mean user"):
        Trainer(replace(session.config, tables={"usr": {"ttl": 3}}), session.schema)


def test_counts_add_up():
    assert RowCounts(1, 2, 3, 4) + RowCounts(1, 1, 1, 1) - RowCounts(2, 3, 4, 5) == RowCounts()
    assert np.sum(list(RowCounts(1, 2, 3, 4).by_name().values())) == 10
