"""Evaluating on a cluster: the numbers of one process, and no trace in training.

Ranks are threads over the in-process network, with their real executors; one test runs real processes.
"""

import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluated_cases import (
    ALL_KEYS,
    HOT,
    STORE,
    TABLES,
    TOPOLOGIES,
    TRAINED_KEYS,
    a_case,
    alone,
    assert_equals_one_process,
    assert_same_bits,
    check,
    evaluating,
    measured_alone,
    run,
    some_batches,
)

from rowhaul.cluster import launch
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.errors import UnknownKeyError
from rowhaul.nn import Batch
from rowhaul.schedule.row_states import State
from rowhaul.train.distributed import evaluation, gathering
from rowhaul.train.distributed.evaluation import score
from rowhaul.train.task_metrics import EvaluationMetrics


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_numbers_are_those_of_one_process_and_training_does_not_notice(topology):
    ranks = check(a_case(topology))
    states = np.concatenate([rest.states["state"] for rest in ranks[0].rests])
    assert {State.OWNED, State.SPLIT} <= set(states.tolist())  # it was not at rest when it was measured
    assert any(rest.waiting for rank in ranks for rest in rank.rests)


@pytest.mark.parametrize(
    ("sync", "hot"), [("full", None), ("static", HOT), ("on-demand", HOT), ("bounded:1", None)]
)
def test_numbers_are_those_of_one_process_however_rows_are_synchronised(sync, hot):
    check(a_case(TOPOLOGIES["two stores"], sync, hot, torch.float64, "adam"))


def test_numbers_are_those_of_one_process_where_rows_stay_at_home():
    check(a_case(TOPOLOGIES["co-located"], "at-home", dispatcher="round-robin"))


@pytest.mark.parametrize("topology", [STORE, TOPOLOGIES["co-located"]])
@pytest.mark.parametrize("sizes", [[], [7], [4, 4], [3, 3, 3, 2]], ids=str)
def test_any_number_of_batches_is_shared(sizes, topology):
    case, batches = replace(a_case(topology), segments=(3,)), some_batches(sizes, ALL_KEYS)
    ranks = run(case, evaluating(batches))
    assert_equals_one_process(case, ranks, batches)
    assert all(rank.evaluated[0].metrics.num_samples == sum(sizes) for rank in ranks)
    if sizes:
        assert ranks[0].evaluated[0].progress[-1][0] == sum(sizes)
    assert [len(rank.evaluated[0].logits) for rank in ranks[:3]] == [
        len(range(worker, len(sizes), 3)) for worker in range(3)
    ]


@pytest.mark.parametrize("held_bytes", [64 << 20, 300])
def test_groups_that_span_workers_are_measured_as_in_one_process(held_bytes, monkeypatch):
    monkeypatch.setattr(gathering, "HELD_BYTES", held_bytes)  # the less, the more rounds
    drawn = np.random.default_rng(3)
    batches = [
        replace(one, groups=drawn.integers(-3, 9, len(one))) for one in some_batches([8] * 7 + [5], ALL_KEYS)
    ]
    schema = Schema(LabelColumn("click"), (), (IdColumn("f0"),), group="user")
    case = replace(a_case(), segments=(3,))
    ranks = run(case, evaluating(batches, lambda: EvaluationMetrics(schema)))
    _, logits = measured_alone(alone(case, ranks, 0), batches)
    metrics = EvaluationMetrics(schema)
    for samples in batches:
        metrics.add(Batch.from_samples(samples), torch.from_numpy(logits[int(samples.index[0])]))
    expected = metrics.compute()
    assert set(expected.in_groups) == {"gauc", "ndcg@10", "hr@10", "mrr"}
    for rank in ranks:
        found = rank.evaluated[0].metrics
        assert repr(found.in_groups) == repr(expected.in_groups)
        assert (found.auc, found.calibration) == (expected.auc, expected.calibration)


def test_a_model_that_was_never_trained_is_measured():
    case = replace(a_case(), segments=(0, 2))
    ranks = run(case, evaluating(batches := some_batches([6, 6], ALL_KEYS)))
    assert_equals_one_process(case, ranks, batches)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_ranks_may_dawdle_anywhere(topology):
    case, batches = replace(a_case(topology), segments=(3,)), some_batches([3] * 20, ALL_KEYS)
    ranks = run(case, evaluating(batches), delay=lambda: time.sleep(random.choice([0, 0, 0, 0.002])))
    assert_equals_one_process(case, ranks, batches)


def test_rows_need_not_be_kept_from_batch_to_batch(monkeypatch):
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 0)
    check(a_case(TOPOLOGIES["two stores"]))


def test_rows_that_are_kept_are_not_pulled_again():
    batches = some_batches([8] * 3, TRAINED_KEYS)
    sent = []
    for many in (batches, batches * 4):
        case = replace(a_case(), segments=(3,))
        ranks = run(case, evaluating(many))
        sent.append(sum(ranks[3].links.posted[3, worker] for worker in range(3)))
    # A tenth: bits and sizes of empty answers, but no rows.
    assert sent[1] < 1.1 * sent[0]


@pytest.mark.parametrize("topology", [STORE, TOPOLOGIES["co-located"]])
def test_unknown_keys_read_as_the_collection_says(topology):
    case, batches = a_case(topology), some_batches([8] * 5, ALL_KEYS)
    ranks = run(case, evaluating(batches), "default")
    assert_equals_one_process(case, ranks, batches, "default")
    read_as_init, _ = measured_alone(alone(case, ranks, 0), batches)
    assert ranks[0].evaluated[0].metrics.log_loss != read_as_init.log_loss


@pytest.mark.parametrize("topology", [STORE, TOPOLOGIES["co-located"], TOPOLOGIES["two stores"]])
def test_an_unknown_key_that_is_an_error_is_raised_on_every_rank_and_training_goes_on(topology):
    case = a_case(topology)
    batches = [*some_batches([8] * 4, 5), *some_batches([8] * 30, ALL_KEYS)]
    ranks = run(case, evaluating(batches), "error")
    for segment in range(len(case.segments)):
        with pytest.raises(UnknownKeyError) as raised:
            measured_alone(alone(case, ranks, segment, "error"), batches)
        for rank in ranks:
            error = rank.evaluated[segment].error
            assert type(error) is UnknownKeyError
            assert str(error) == str(raised.value)
    assert_same_bits(ranks, run(case))


def test_an_error_in_one_worker_ends_the_evaluation_of_all():
    """Of a stream that never ends: the others are told at once, not when they are through."""
    case = replace(a_case(), segments=(3,))
    good = some_batches([8], TRAINED_KEYS)[0]
    bad = replace(good, labels=np.full(8, 0.5, np.float32))

    def endless(rank):
        yield from [good] * 7
        yield bad if rank == 1 else good
        while True:
            yield good

    ranks = run(case, lambda rank: evaluating(endless(rank.rank))(rank))
    assert [str(rank.evaluated[0].error) for rank in ranks] == ["labels for metrics must be 0 or 1"] * 4


def test_samples_without_labels_are_refused_on_every_rank():
    case = replace(a_case(), segments=(3,))
    ranks = run(case, evaluating([replace(one, labels=None) for one in some_batches([8] * 4, TRAINED_KEYS)]))
    assert all("evaluation needs labels" in str(rank.evaluated[0].error) for rank in ranks)


def test_workers_that_read_different_streams_are_told():
    case, batches = replace(a_case(), segments=(3,)), some_batches([8] * 5, TRAINED_KEYS)
    ranks = run(case, lambda rank: evaluating(batches[: 4 if rank.rank == 2 else 5])(rank))
    for rank in ranks:
        assert "worker 0 has read 40 samples in 5 batches, worker 2 32 in 4" in str(rank.evaluated[0].error)


def test_a_score_that_is_closed_early_leaves_the_others_to_finish():
    case, batches = replace(a_case(), segments=(3, 2)), some_batches([8] * 9, TRAINED_KEYS)

    def between(rank):
        scored = score(rank.training, batches)
        if rank.rank == 1:
            next(scored)
            scored.close()
        rank.evaluated.append([int(batch.index[0]) for batch, _ in scored])

    ranks = run(case, between)
    assert [len(rank.evaluated[0]) for rank in ranks] == [3, 0, 3, 0]
    assert_same_bits(ranks, run(case))


def test_the_model_is_left_as_it_was():
    case, batches = replace(a_case(), segments=(3,)), some_batches([8] * 4, ALL_KEYS)

    def between(rank):
        model = rank.model
        model.frozen, model.free = torch.nn.Dropout(0.5).eval(), torch.nn.Dropout(0.5)
        source = model.rows.source
        for _ in score(rank.training, batches):
            assert torch.is_grad_enabled()
            assert model.rows.source is source
            assert (model.training, model.free.training, model.frozen.training) == (True, True, False)
        rank.evaluated.append(True)

    assert all(rank.evaluated for rank in run(case, between))


SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
import rowhaul
from rowhaul.cluster import join
from rowhaul.runtime.flush import flushed_blocks
from rowhaul.train.distributed import distribute
from rowhaul.train.distributed.evaluation import evaluate, score
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from evaluated_cases import a_case, some_batches, ALL_KEYS
from in_process_cluster import per_sample_loss

case, folder = a_case(), Path(sys.argv[3])
batches = some_batches([8, 8, 8, 8, 5], ALL_KEYS, seed=1)
with join(colocated=True) as cluster:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = distribute(cluster, model, case.batches)
    while not training.finished:
        for batch in training.batches(5):
            loss = batch.loss(per_sample_loss(model(batch), batch))
            loss.backward()
            training.step(loss)
            optimizer.step(); optimizer.zero_grad()
        metrics = evaluate(training, batches)
    logits = {int(batch.index[0]): logits.tolist() for batch, logits in score(training, batches)}
    flushed, home, rows = training.flushed(), training.runtime.mover.home, []
    if home is not None:
        for table in range(3):
            for keys, records in flushed_blocks(home, flushed, table):
                rows += [(table, key, record) for key, record in zip(keys.tolist(), records.tolist())]
    dense = [one.detach().tolist() for one in model.parameters()]
    training.close()
report = {"metrics": repr(metrics), "logits": logits, "rows": rows, "dense": dense}
(folder / f"{cluster.rank}.json").write_text(json.dumps(report))
"""


@pytest.mark.slow
def test_real_processes_measure_what_one_process_does(tmp_path):
    (tmp_path / "evaluate_it.py").write_text(SCRIPT)
    here = Path(__file__).parent
    arguments = [str(tmp_path / "evaluate_it.py"), str(here), str(here.parent / "exact"), str(tmp_path)]
    launch(arguments, 2, colocated=True, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    model = a_case().model()
    for parameter, value in zip(model.parameters(), reports[0]["dense"], strict=True):
        parameter.data.copy_(torch.tensor(value))
    for number, table in enumerate(TABLES):
        rows = {key: record for one in reports for of, key, record in one["rows"] if of == number}
        model.rows.load_rows(
            table.name, np.array(list(rows)), np.array(list(rows.values()), dtype=np.float32)
        )
    metrics, logits = measured_alone(model.eval(), some_batches([8, 8, 8, 8, 5], ALL_KEYS, seed=1))
    assert [report["metrics"] for report in reports] == [repr(metrics)] * 2
    got = {int(first): values for report in reports for first, values in report["logits"].items()}
    assert got == {first: values.tolist() for first, values in logits.items()}
