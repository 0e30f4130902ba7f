"""`--data-from rank0`: only rank 0 has the files, and the model is the same to the bit.

Ranks are threads over the in-process network; the last tests run real processes.
"""

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

from checkpointed_ranks import CONFIG, contents, on_threads
from click_logs import click_log
from rowhaul.cluster import launch
from rowhaul.cluster.roll_call import Member
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ClusterError, ConfigError, DataError
from rowhaul.pruning.config import PruneConfig
from rowhaul.runtime.flush import flushed_blocks
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.data_streams import (
    StreamFacts,
    evaluation_batches,
    hot_rows_for_all,
    open_streams_for_all,
    schema_for_all,
)
from rowhaul.train.distributed.evaluation import evaluate
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.trainer import Trainer, per_sample_loss
from slow_cases import mostly_slow

RANK0 = {"data_from": "rank0"}
STORE = ClusterConfig(workers=3, cache="190")
PRUNED = "rows are pruned"
LAYOUTS = {
    "rank 0 plans": (STORE, ((0,), (1, 2), (3,))),
    "the store plans for rank 0": (STORE, ((0, 1, 3), (2,))),
    "one host": (STORE, ((0, 1, 2, 3),)),
    "co-located, no look-ahead": (replace(STORE, colocated=True, look_ahead=0), ((0, 1), (2,))),
    "hot rows, a worker without samples": (replace(STORE, hot_rows=20, shares="2,1,0"), ((0, 3), (1,), (2,))),
    PRUNED: (STORE, ((0, 3), (1,), (2,))),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Files of which each holds several batches, and one to evaluate on."""
    folder = tmp_path_factory.mktemp("logs")
    for number, size in enumerate((500, 400, 300)):
        pq.write_table(click_log(size, number), folder / f"part-{number}.parquet", row_group_size=150)
    (folder / "test").mkdir()
    pq.write_table(click_log(700, 9), folder / "test" / "part-0.parquet")
    return folder


def with_data(cluster, hosts):
    """A rank that is a thread, with data links and on one of several hosts."""
    cluster.data = cluster.moves._network.links(cluster.rank)
    cluster.hosts = hosts
    cluster.local_ranks = next(host for host in hosts if cluster.rank in host)
    cluster.leader = max(cluster.local_ranks)
    cluster.members = [
        Member(rank, f"id{rank}", f"host{number}", f"machine-{number}", "", 0, cluster.topology)
        for number, host in enumerate(hosts)
        for rank in host
    ]
    cluster.members.sort(key=lambda member: member.rank)
    return cluster


def train(cluster, hosts, config, schema, folder, evaluation_batch=96):
    """On one rank: what it learned, and what was measured on the way."""
    with_data(cluster, hosts)
    reads = cluster.rank == 0 or config.cluster.data_from == "every_host"
    data, held_out = (folder, folder / "test") if reads else (None, None)
    schema = schema_for_all(cluster, config, schema if reads else None)
    trainer = Trainer(config, schema)
    stream, evaluation = open_streams_for_all(cluster, config, schema, data, held_out, 0)
    if reads:
        evaluation = SampleStream(held_out, schema, evaluation_batch)
    trainer.check_keys(stream)
    layout, settings = layout_of(trainer.collection), config.cluster
    hot = hot_rows_for_all(cluster, config, stream, trainer.collection)
    training = distribute(
        cluster,
        trainer.model,
        stream if reads else None,
        settings=layout.schedule_settings(settings, cluster.topology, hot=hot),
        data_from=settings.data_from,
    )
    losses, metrics = [], []
    try:
        while not training.finished:
            for batch in training.batches(7):
                loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
                loss.backward()
                losses.append(training.step(loss))
                trainer.dense.step()
                trainer.dense.zero_grad()
            with evaluation_batches(training, evaluation) as batches:
                metrics.append(repr(evaluate(training, batches)))
        flushed, home, rows = training.flushed(), training.runtime.mover.home, {}
        for table in range(len(training.layout.specs)) if home is not None else ():
            for keys, records in flushed_blocks(home, flushed, table):
                rows |= {(table, key): one.tobytes() for key, one in zip(keys.tolist(), records, strict=True)}
        weights = [one.detach().numpy().tobytes() for one in trainer.model.parameters()]
        facts = (stream.num_batches, stream.num_samples, stream.fingerprint)
        return losses, metrics, weights, rows, facts, dict(training.runtime.feed.data_bytes)
    finally:
        training.close()


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, "rank 0 plans"))
def test_the_model_is_the_same_to_the_bit(layout, logs, log_schema):
    cluster, hosts = LAYOUTS[layout]
    config = replace(CONFIG, cluster=cluster, shuffle_rows=200, epochs=2, max_steps=0)
    if layout == PRUNED:
        config = replace(config, prune=PruneConfig(ratio="60%", chunks=2, period=10, cold_start=12))
    learned = {}
    for data_from in ("every_host", "rank0"):
        chosen = replace(config, cluster=replace(cluster, data_from=data_from))
        learned[data_from] = on_threads(
            cluster.topology(),
            partial(train, hosts=hosts, config=chosen, schema=log_schema, folder=logs),
        )
    for mine, theirs in zip(learned["rank0"], learned["every_host"], strict=True):
        assert mine[:5] == theirs[:5]
        assert not theirs[5]
    rank0 = learned["rank0"][0]
    assert len(rank0[0]) == 38  # two epochs of 1,200 samples, each with a short batch
    assert sum(len(rows) for *_, rows, _, _ in learned["rank0"]) > 400
    if len(hosts) == 1:
        assert rank0[5]["dense"] == 2400 * 8  # all to the leader, next door
    else:
        others = [rank for host in hosts for rank in host if 0 not in host]
        assert rank0[5]["ids"] > 0
        assert (rank0[5]["dense"] > 0) == any(rank < 3 for rank in others)
    assert rank0[5]["evaluation"] > 0


def test_a_file_that_goes_missing_in_the_middle_is_the_same_error_everywhere(logs, log_schema, tmp_path):
    for path in logs.glob("*.parquet"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = replace(CONFIG, cluster=replace(STORE, **RANK0), batch_size=20, shuffle_rows=0)
    trained = {}

    def run(cluster):
        with_data(cluster, ((0, 3), (1, 2)))
        trainer = Trainer(config, log_schema)
        stream, _ = open_streams_for_all(cluster, config, log_schema, tmp_path, None, 0)
        sizes = layout_of(trainer.collection).sizes()
        training = distribute(
            cluster,
            trainer.model,
            stream if cluster.rank == 0 else None,
            settings=config.cluster.schedule(cluster.topology, sizes),
            data_from="rank0",
        )
        if cluster.rank == 0:
            (tmp_path / "part-2.parquet").unlink()
        try:
            for batch in training.batches():
                loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
                loss.backward()
                training.step(loss)
                trainer.dense.zero_grad()
            return None
        except Exception as error:
            trained[cluster.rank] = training.iteration
            return type(error), str(error)
        finally:
            training.close()

    results = on_threads(STORE.topology(), run)
    assert len(set(results)) == 1, results
    kind, text = results[0]
    assert issubclass(kind, DataError | OSError)
    assert "part-2.parquet" in text
    assert set(trained.values()) == {45}  # all that could be read


class Spoilt:
    """An evaluation stream of which one batch cannot be measured, or cannot be read."""

    num_samples = 700

    def __init__(self, stream, number, readable):
        self._stream, self._number, self._readable = stream, number, readable

    def __iter__(self):
        for number, samples in enumerate(self._stream):
            if number == self._number:
                if not self._readable:
                    raise DataError("part-0.parquet is damaged")
                samples = replace(samples, labels=samples.labels + np.float32(0.5))
            yield samples


@pytest.mark.parametrize("readable", [True, False])
# Of 18 batches 0 and 3 are rank 0's, 7 and 17 are not.
@pytest.mark.parametrize("number", mostly_slow([0, 3, 7, 17], 3, 17))
def test_an_evaluation_that_fails_anywhere_fails_on_all_and_training_goes_on(
    number, readable, logs, log_schema
):
    config = replace(CONFIG, cluster=replace(STORE, **RANK0))

    def run(cluster):
        with_data(cluster, LAYOUTS["the store plans for rank 0"][1])
        trainer = Trainer(config, log_schema)
        stream, _ = open_streams_for_all(cluster, config, log_schema, logs, None, 0)
        evaluation = Spoilt(SampleStream(logs / "test", log_schema, 40), number, readable)
        sizes = layout_of(trainer.collection).sizes()
        training = distribute(
            cluster,
            trainer.model,
            stream if cluster.rank == 0 else None,
            settings=config.cluster.schedule(cluster.topology, sizes),
            data_from="rank0",
        )
        said = []
        try:
            for _ in range(2):
                for batch in training.batches(4):
                    batch.loss(per_sample_loss(trainer.model(batch), batch)).backward()
                    training.step()
                    trainer.dense.zero_grad()
                with pytest.raises(DataError) as raised, evaluation_batches(training, evaluation) as batches:
                    evaluate(training, batches)
                said.append(str(raised.value))
            return said, training.iteration
        finally:
            training.close()

    words = "labels for metrics must be 0 or 1" if readable else "part-0.parquet is damaged"
    assert on_threads(STORE.topology(), run) == [([words] * 2, 8)] * 4


def test_ranks_without_files_get_facts_that_say_the_same(logs, log_schema):
    config = replace(CONFIG, cluster=replace(STORE, **RANK0))

    def run(cluster):
        with_data(cluster, LAYOUTS["one host"][1])
        schema = schema_for_all(cluster, config, log_schema if cluster.rank == 0 else None)
        data = logs if cluster.rank == 0 else "nowhere"
        stream, evaluation = open_streams_for_all(cluster, config, schema, data, None, 64)
        return schema, evaluation, stream

    first, *others = on_threads(STORE.topology(), run)
    assert isinstance(first[2], SampleStream)
    for schema, evaluation, facts in others:
        assert (schema, evaluation) == (log_schema, None)
        assert facts == StreamFacts.of(first[2])
        assert facts.num_batches == first[2].num_batches == 18


def errors_of_all(run):
    """What every rank raises."""

    def caught(cluster):
        try:
            run(cluster)
        except Exception as error:
            return error
        return None

    return on_threads(STORE.topology(), caught)


def test_files_that_rank_0_does_not_see_are_told_to_all(log_schema):
    config = replace(CONFIG, cluster=replace(STORE, **RANK0))
    errors = errors_of_all(
        lambda cluster: open_streams_for_all(
            with_data(cluster, LAYOUTS["one host"][1]), config, log_schema, "nowhere", None, 0
        )
    )
    for error in errors:
        assert type(error) is DataError
        assert "no such file: nowhere" in str(error)


def test_a_host_that_does_not_see_the_files_is_named_on_all_with_what_to_do(logs, log_schema):
    config = replace(CONFIG, cluster=STORE)

    def run(cluster):
        with_data(cluster, ((0, 3), (1,), (2,)))
        open_streams_for_all(cluster, config, log_schema, "nowhere" if cluster.rank == 2 else logs, None, 0)

    for error in errors_of_all(run):
        assert type(error) is ClusterError
        for words in ("rank 2 (worker 2) on machine-2", "no such file: nowhere", "--data-from rank0", "copy"):
            assert words in str(error)


def test_files_that_nobody_sees_are_a_wrong_path(log_schema):
    config = replace(CONFIG, cluster=STORE)
    for error in errors_of_all(
        lambda cluster: open_streams_for_all(
            with_data(cluster, LAYOUTS["one host"][1]), config, log_schema, "nowhere", None, 0
        )
    ):
        assert type(error) is DataError


def test_samples_must_be_where_they_are_read(log_schema):
    trainer = Trainer(CONFIG, log_schema)

    def run(cluster, data_from):
        with_data(cluster, LAYOUTS["one host"][1])
        settings = STORE.schedule(cluster.topology, layout_of(trainer.collection).sizes())
        distribute(cluster, trainer.model, None, settings=settings, data_from=data_from)

    with pytest.raises((ConfigError, ClusterError), match="None"):
        on_threads(STORE.topology(), partial(run, data_from="every_host"))


SCRIPT = """
import functools, json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from rowhaul.cluster import join
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run

rank = int(os.environ["RANK"])
data, out, config, break_it = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
run.join = functools.partial(join, host="a" if rank in (0, 3) else "b")
sees = rank == 0 or config["cluster"]["data_from"] == "every_host"
if break_it == "blind":
    sees = rank in (0, 3)
arguments = [data, data / "test"] if sees else ["/nowhere/part.parquet", None]
schema = Schema.read(data / "schema.yaml") if sees or break_it else None
try:
    result = run.train_on_cluster(
        TrainConfig.from_dict(config), schema, arguments[0], eval_data=arguments[1], out=out,
        resume=out.exists())
    said = repr(result.metrics)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
(out.parent / f"{out.name}-{rank}.txt").write_text(said)
"""


def run_processes(folder, name, logs, config, break_it=""):
    """Train on three workers and a store, as two hosts; what each rank said."""
    (folder / "train_it.py").write_text(SCRIPT)
    arguments = [str(folder / "train_it.py"), str(logs), str(folder / name)]
    plain = json.dumps(config.to_dict())
    launch([*arguments, plain, break_it], 3, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})
    return [(folder / f"{name}-{rank}.txt").read_text() for rank in range(4)]


@pytest.mark.slow
def test_real_processes_of_which_only_rank_0_sees_the_files(logs, log_schema, tmp_path):
    """Trained in one go where every host reads; with a pause, and resumed, where only one can."""
    log_schema.write(logs / "schema.yaml")
    cluster = ClusterConfig(workers=3, cache="190", hot_rows=10)
    config = replace(CONFIG, cluster=cluster, epochs=2, max_steps=20, log_every=5, rates=type(CONFIG.rates)())
    said = run_processes(tmp_path, "every", logs, config)
    alone = replace(config, cluster=replace(cluster, **RANK0))
    run_processes(tmp_path, "one", logs, replace(alone, max_steps=9))
    said_later = run_processes(tmp_path, "one", logs, alone)
    assert said == said_later
    assert said[0].startswith("MetricValues")
    assert len(set(said)) == 1
    one, other = contents(tmp_path / "every", 20), contents(tmp_path / "one", 20)
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert any("of ids" in line.get("text", "") and "of dense" in line["text"] for line in lines)


@pytest.mark.slow
def test_real_processes_on_a_host_without_the_files(logs, log_schema, tmp_path):
    log_schema.write(logs / "schema.yaml")
    config = replace(CONFIG, cluster=ClusterConfig(workers=3), max_steps=5)
    said = run_processes(tmp_path, "blind", logs, config, "blind")
    assert len(set(said)) == 1
    assert said[0].startswith("ClusterError: rank 1 (worker 1), rank 2 (worker 2) on ")
    assert "--data-from rank0" in said[0]
