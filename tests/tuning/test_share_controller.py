"""How shares are chosen: from measured pairs of ranks to links, and by trying candidates in training."""

from types import SimpleNamespace

import numpy as np
import pytest

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.training import layout_of
from rowhaul.transport.calibration import LinkMeasurements
from rowhaul.tuning import shares


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
    keeper = shares.ShareController(training, list, links, told.append)
    active, due = (4, 4), []
    seconds = {(4, 4): 3.0, (8, 0): 1.0, (6, 2): 2.0}
    for _ in range(200):
        clock[0] += seconds[active]
        keeper.observe(job(active))
        if keeper._thread is not None:
            keeper._thread.join()
        due.append(posted[-1][1] if posted else active)
        active = due[-3] if len(due) > 2 else active  # a record is in force two iterations later
    assert [value for _, value in posted] == [(4, 4), (8, 0), (6, 2), (8, 0)]
    assert keeper.decided
    assert active == (8, 0)
    assert "shares [8, 0] with joint: 1000.0 ms" in told[0]


def test_shares_of_pruned_rows_are_tried_on_the_chunks_that_will_be_left():
    """And nothing else is needed to have candidates for them."""
    table = EmbeddingBagConfig(embedding_dim=8, name="item", feature_names=["item"])
    pruning = PruneSettings(ratio=0.9, chunks=2)
    collection = EmbeddingBagCollection([table], optimizer=row_optimizer("sgd", lr=0.1), pruning=pruning)
    again = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 55 + np.arange(10)))
    keys = np.concatenate([np.arange(100), again, again])[:700]  # ten of a hundred rows are read again
    lengths = np.ones((1, 70), np.int32)
    parts = [keys[begin : begin + 70] for begin in range(0, 700, 70)]
    samples = [SimpleNamespace(features=("item",), values=part, lengths=lengths) for part in parts]
    stream = SimpleNamespace(batch_size=70, from_beginning=lambda count: samples)
    batches = shares.first_batches(stream, collection)
    layout = layout_of(collection)
    read = {pair for ids in batches for pair in zip(ids.tables, ids.keys, strict=True)}
    assert len({key for _, key in read} & set(range(10))) >= 9
    assert len(read) <= 20  # chunks: a tenth of those of a hundred rows
    settings = layout.schedule_settings(ClusterConfig(cache="60"), Topology(2, 1))
    links = shares.MeasuredLinks((1e6, 1e5, 2e6), (0.0, 0.0, 0.0))
    found = shares.candidates(settings, batches, links, (1e-5, 1e-5), 1e-4)
    assert [35, 35] in [list(one.shares) for one in found]


def outcome(given):
    return SimpleNamespace(shares=given, dispatch="joint")


def job(given):
    measures = np.ones((3, len(MEASURES)))
    worker = np.repeat(np.arange(len(given)), given)
    return SimpleNamespace(measures=measures, plan=SimpleNamespace(worker=worker, num_workers=len(given)))
