"""What `rowhaul size` counts and adds up, against what is really there."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.cli.size.command import describe_run
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.monitoring.settings import MonitoringConfig
from rowhaul.nn import Batch
from rowhaul.pruning.config import PruneConfig
from rowhaul.sizing.fit import suggestions
from rowhaul.sizing.row_counts import ERROR, DistinctKeys, count_rows
from rowhaul.store.footprint import index_bytes
from rowhaul.train import train_run
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.trainer import Trainer

NUM_SAMPLES = 60_000
CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=16, options={"top": [16], "bottom": [8]}), batch_size=6000, log_every=1000
)
SCHEMA = Schema.from_dict(
    {"label": "y", "ids": ["user", {"name": "item", "table": "items"}, {"name": "last", "table": "items"}]}
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A table whose every key is new, and one of 1,000 keys that two features read."""
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("sized")
    columns = {
        "y": random.integers(0, 2, NUM_SAMPLES).astype(np.int8),
        "user": np.arange(NUM_SAMPLES) * 977,
        "item": random.integers(0, 800, NUM_SAMPLES),
        "last": [[int(one), 999] for one in random.integers(200, 1000, NUM_SAMPLES)],
    }
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=20_000)
    return folder


@pytest.fixture(scope="module")
def counts(log):
    return count_rows(log, SCHEMA)


@pytest.fixture(scope="module")
def described(log, counts):
    return describe_run(CONFIG, SCHEMA, log, counts)


KEYS = {
    "random": lambda n: np.random.default_rng(3).integers(-(2**63), 2**63 - 1, n),
    "in order": lambda n: np.arange(n) - n // 2,
    "in the high bits": lambda n: np.arange(n) << 40,
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("num_keys", [0, 1, 10, 1000, 40_000, 500_000])
def test_distinct_keys_are_counted_to_the_stated_error(kind, num_keys):
    keys = KEYS[kind](num_keys).astype(np.int64)
    sketch = DistinctKeys()
    for part in np.array_split(np.concatenate([keys, keys[: num_keys // 2], keys]), 3):
        sketch.add(part)
    assert abs(sketch.estimate() - num_keys) <= 4 * ERROR * num_keys + 0.01


def test_rows_of_files_are_counted_by_table(counts):
    assert counts.rows["user"] == pytest.approx(NUM_SAMPLES, rel=4 * ERROR)
    assert counts.rows["items"] == pytest.approx(1000, rel=4 * ERROR)
    assert (counts.samples, counts.read, counts.ids_per_sample) == (NUM_SAMPLES, NUM_SAMPLES, 4)
    assert not counts.is_sample


def test_a_sample_is_extrapolated_by_how_each_table_grows(log):
    found = count_rows(log, SCHEMA, sample=NUM_SAMPLES // 10)
    assert found.is_sample
    assert found.read == NUM_SAMPLES // 10
    assert found.rows["user"] == pytest.approx(NUM_SAMPLES, rel=0.05)  # grows as the samples
    assert found.rows["items"] == pytest.approx(1000, rel=0.05)  # does not grow any more


def test_only_what_will_be_trained_counts(log):
    found = count_rows(log, SCHEMA, limit=9000)
    assert (found.samples, found.is_sample) == (9000, False)
    assert found.rows["user"] == pytest.approx(9000, rel=4 * ERROR)


def test_predicted_bytes_are_what_training_takes(log, described):
    """Rows, state and index within 10 %: an index grows in steps, and may do so a little earlier or later."""
    run, _ = described
    (rank,) = run.estimate().ranks
    result = train_run(CONFIG, SCHEMA, log)
    assert result.num_rows == pytest.approx(sum(run.rows.values()), rel=4 * ERROR)
    predicted = rank.parts["rows"] + rank.parts["index"]
    assert 0.9 <= predicted / result.row_bytes <= 1.1


def test_the_dense_part_is_measured_not_guessed(log, described):
    run, _ = described
    trainer = Trainer(CONFIG, SCHEMA)
    samples = next(iter(SampleStream(log, SCHEMA, 64)))
    trainer.train_step(Batch.from_samples(samples))
    weights = sum(one.nbytes for one in [*trainer.model.parameters(), *trainer.model.buffers()])
    states = [value for state in trainer.dense.state.values() for value in state.values()]
    assert run.model.weights == weights
    assert run.model.gradients == sum(
        one.grad.nbytes if one.grad is not None else one.nbytes for one in trainer.model.parameters()
    )
    assert run.model.optimizer == sum(value.nbytes for value in states)
    assert run.model.per_sample >= 4 * (3 * 16 + 16)  # pooled vectors and a layer, at least


def test_rows_of_a_model_may_be_wider_than_an_embedding(log, counts):
    wide = replace(CONFIG, model=ModelConfig("wide_deep", 16))
    run, _ = describe_run(wide, SCHEMA, log, counts)
    assert {table.dim for table in run.estimate().tables} == {17}


@pytest.mark.parametrize("num_keys", [3000, 60_000, 400_000])
def test_an_index_of_many_keys_is_a_larger_one_of_few(num_keys):
    """Beyond what is measured, twice the keys take twice the bytes, and never less than a key and a place."""
    assert index_bytes(num_keys) >= 16 * num_keys
    assert index_bytes(num_keys << 12) == pytest.approx(index_bytes(num_keys << 10) * 4, rel=0.05)


def test_ranks_share_the_rows_and_machines_the_ranks(described):
    run, _ = described
    cluster = ClusterConfig(workers=3, stores=2, cache="1000", hot_rows=50)
    spread = replace(run, config=replace(CONFIG, cluster=cluster), machines=2).estimate()
    alone = run.estimate()
    assert [rank.role for rank in spread.ranks] == ["worker"] * 3 + ["store"] * 2
    assert spread.machines == ((0, 1, 2), (3, 4))
    stored = [rank.parts["rows"] for rank in spread.ranks[3:]]
    assert sum(stored) >= alone.ranks[0].parts["rows"]
    assert max(stored) < alone.ranks[0].parts["rows"]
    assert all({"cache", "hot rows", "step"} <= rank.parts.keys() for rank in spread.ranks[:3])
    assert [rank.rank for rank in spread.ranks if "scheduler" in rank.parts] == [2, 4]  # one a machine
    assert spread.needed == max(spread.machine_bytes)
    assert sum(spread.machine_bytes) == sum(rank.total for rank in spread.ranks)


def test_colocated_workers_store_and_cache(described):
    run, _ = described
    cluster = ClusterConfig(workers=4, colocated=True, cache="512MiB")
    found = replace(run, config=replace(CONFIG, cluster=cluster)).estimate()
    assert len(found.ranks) == 4
    assert all({"rows", "index", "cache", "saving"} <= rank.parts.keys() for rank in found.ranks)
    whole = sum(run.rows.values()) * 17 * 4
    assert found.ranks[0].parts["cache"] < 3 * whole + (8 << 20)  # a cache holds no more than there is


def test_rows_that_stay_at_home_need_no_caches(described):
    run, _ = described
    cluster = ClusterConfig(workers=4, colocated=True)

    def parts(machines=1, **changes):
        config = replace(CONFIG, cluster=replace(cluster, **changes.pop("cluster", {})), **changes)
        found = replace(run, config=config, machines=machines).estimate()
        return [rank.parts for rank in found.ranks]

    at_home, planned = parts(), parts(cluster={"sync": "on-demand"})
    moving = {"cache", "flushing", "scheduler"}
    assert all(one.keys() >= {"rows", "index", "saving", "step"} for one in at_home)
    assert not any(moving & one.keys() for one in at_home)
    assert all(one["saving"] < other["saving"] for one, other in zip(at_home, planned, strict=True))
    assert not any(moving & one.keys() for one in parts(2, cluster={"sync": "at-home"}))
    explained = parts(monitoring=MonitoringConfig(explain=True))[3]
    assert moving & explained.keys() == {"scheduler"}  # it counts rows as plans do
    assert explained["scheduler"] < planned[3]["scheduler"]
    for rest in (parts(2), parts(tables={"user": {"ttl": 2}}), parts(row_dtype="int8")):
        assert moving <= rest[3].keys()


PRUNED = {
    "a ratio": PruneConfig(ratio="80%", period=2, two_dimensions=False),
    "two dimensions": PruneConfig(ratio="90%", period=2, cold_start=3),
    "a budget": PruneConfig(budget="1.5MiB", period=2, tail="zeros"),
    "a budget with a shared tail": PruneConfig(budget="1.5MiB"),
    "columns alone": PruneConfig(dims=8, cold_start=2, period=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("prune", PRUNED.values(), ids=list(PRUNED))
def test_pruned_runs_take_no_more_than_predicted_and_not_much_less(prune, log, counts):
    """At the fullest step; pruning leaves entries free, and new rows have not filled all of them by then."""
    config = replace(CONFIG, batch_size=3000, prune=prune)
    run, _ = describe_run(config, SCHEMA, log, counts)
    (rank,) = run.estimate().ranks
    predicted = rank.parts["rows"] + rank.parts["index"]
    trainer, most = Trainer(config, SCHEMA), 0
    for samples in SampleStream(log, SCHEMA, config.batch_size):
        trainer.train_step(Batch.from_samples(samples))
        most = max(most, trainer.collection.allocated_bytes)
    assert 0.75 <= most / predicted <= 1.1
    tables, whole = run.estimate().tables, run.unpruned.estimate().tables
    assert sum(table.total for table in tables) == pytest.approx(predicted, rel=0.02)
    if not prune.dims:  # fewer columns of such short rows are less than the entries that they take
        assert predicted < 0.75 * sum(table.total for table in whole)


@pytest.mark.slow
def test_a_pruned_cluster_is_told_part_by_part(log, counts):
    cluster = ClusterConfig(workers=2, stores=2, cache="500")
    prune = PruneConfig(ratio="90%", two_dimensions=False, utility="gradient")
    config = replace(CONFIG, cluster=cluster, prune=prune)
    run, _ = describe_run(config, SCHEMA, log, counts)
    run = replace(run, rows={name: 100 * count for name, count in run.rows.items()})
    found, whole = run.estimate(), run.unpruned.estimate()
    assert {"cache", "utilities"} <= found.ranks[0].parts.keys()
    assert [rank.rank for rank in found.ranks if "chunk map" in rank.parts] == [3]
    assert found.ranks[3].parts["rows"] < 0.5 * (whole.ranks[3].parts["rows"] + whole.ranks[3].parts["index"])
    assert "chunk map" not in whole.ranks[3].parts


def test_a_budget_that_no_batch_fits_in_is_refused(log, counts):
    prune = PruneConfig(budget="100KiB", tail="zeros")
    run, _ = describe_run(replace(CONFIG, prune=prune), SCHEMA, log, counts)
    assert run.batch_rows == pytest.approx(6000 + 1000, abs=5)  # every user is new; nearly all items
    with pytest.raises(ConfigError, match=f"one batch reads {run.batch_rows:,} different rows"):
        run.check()
    with pytest.raises(ConfigError, match=r"prune\.chunks is 20, but rows of table 'user' have 16"):
        describe_run(replace(CONFIG, prune=PruneConfig(ratio="50%", chunks=20)), SCHEMA, log, counts)


POLICIES = {
    "limit": ({"max_rows": 2000}, 2000 + 6000, "max_rows 2,000"),
    "time": ({"ttl": 2}, 3 * 6000, "3 batches can name"),
    "sightings": ({"admit_after": 2}, NUM_SAMPLES // 2, "seen 2 times"),
    "nothing": ({"ttl": 1000}, NUM_SAMPLES, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_policies_bound_what_a_table_holds(kind, log, counts):
    policy, most, why = POLICIES[kind]
    config = replace(CONFIG, tables={"user": policy})
    run, _ = describe_run(config, SCHEMA, log, counts)
    kept = run.kept["user"]
    assert kept.rows == pytest.approx(most, rel=4 * ERROR)
    assert why in kept.why
    assert run.kept["items"].rows == run.rows["items"]
    (rank,) = run.estimate().ranks
    assert rank.parts["policies"] > 0
    trainer, held = Trainer(config, SCHEMA), 0
    for samples in SampleStream(log, SCHEMA, config.batch_size):
        trainer.train_step(Batch.from_samples(samples))
        held = max(held, trainer.collection.num_rows("user"))
    assert held <= kept.rows * (1 + 4 * ERROR)
    assert trainer.lifecycle.lifetimes.memory_bytes <= 1.1 * rank.parts["policies"] + (1 << 16)


def test_hot_rows_that_are_chosen_later_have_room(described):
    run, _ = described
    cluster = ClusterConfig(workers=3, stores=2, cache="1000", hot_rows="auto")
    found = replace(run, config=replace(CONFIG, cluster=cluster)).estimate()
    said = replace(run, config=replace(CONFIG, cluster=replace(cluster, hot_rows=500))).estimate()
    assert found.ranks[0].parts["hot rows"] == said.ranks[0].parts["hot rows"] > 0


@pytest.mark.parametrize("share", [0.45, 0.7])
def test_every_suggestion_fits(described, share):
    """Rows of Adam, a thousand times as many, in a share of the memory that they need."""
    run, model_of = described
    adam = replace(CONFIG, rows=OptimizerConfig("adam", 0.01), cluster=ClusterConfig(cache="16MiB"))
    large = replace(run, config=adam, rows={name: 1000 * count for name, count in run.rows.items()})
    memory = int(share * large.estimate().needed)
    found = list(suggestions(large, memory, model_of))
    assert {one.setting for one in found} >= {"model.embedding_dim", "machines", "rows", "prune"}
    assert all(one.needed <= memory for one in found)
    by_name = {one.setting: one.value for one in found}
    dim = int(by_name["model.embedding_dim"])
    smaller = replace(adam, model=replace(CONFIG.model, embedding_dim=dim))
    assert replace(large, config=smaller, model=model_of(dim)).estimate().needed <= memory
    larger = replace(adam, model=replace(CONFIG.model, embedding_dim=2 * dim))
    assert replace(large, config=larger, model=model_of(2 * dim)).estimate().needed > memory
