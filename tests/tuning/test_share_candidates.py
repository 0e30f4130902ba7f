"""Which shares are proposed: from a trace, measured links and what workers cost."""

from types import SimpleNamespace

import numpy as np
import pytest

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, ScheduleSettings, Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.tables import layout_of
from rowhaul.tuning.shares import candidates
from rowhaul.tuning.shares.links import MeasuredLinks


def test_seconds_per_sample_of_an_idle_worker_are_those_of_the_others():
    one = np.zeros((3, len(MEASURES)))
    one[:, MEASURES.index("compute")] = [0.2, 0.4, 0.0]
    one[:, MEASURES.index("samples")] = [10, 10, 0]
    assert candidates.seconds_per_sample([one, one]) == pytest.approx((0.02, 0.04, 0.03))


@pytest.mark.slow
def test_shares_of_pruned_rows_are_tried_on_the_chunks_that_will_be_left():
    """And nothing else is needed to have candidates for them."""
    table = EmbeddingBagConfig(embedding_dim=8, name="item", feature_names=["item"])
    pruning = PruneSettings(ratio=0.9, chunks=2)
    collection = EmbeddingBagCollection([table], optimizer=row_optimizer("sgd", lr=0.1), pruning=pruning)
    again = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 55 + np.arange(10)))
    keys = np.concatenate([np.arange(100), again, again])[:700]  # ten of a hundred rows are read again
    lengths = np.ones((1, 70), np.int32)
    parts = [keys[begin : begin + 70] for begin in range(0, 700, 70)]
    samples = [SimpleNamespace(features=("item",), values=part, lengths=lengths, time=0) for part in parts]
    stream = SimpleNamespace(batch_size=70, from_beginning=lambda count: samples)
    batches = candidates.first_batches(stream, collection)
    layout = layout_of(collection)
    read = {pair for ids in batches for pair in zip(ids.tables, ids.keys, strict=True)}
    assert len({key for _, key in read} & set(range(10))) >= 9
    assert len(read) <= 20  # chunks: a tenth of those of a hundred rows
    settings = layout.schedule_settings(ClusterConfig(cache="60"), Topology(2, 1))
    links = MeasuredLinks((1e6, 1e5, 2e6), (0.0, 0.0, 0.0))
    found = candidates.propose(settings, batches, links, candidates.Costs((1e-5, 1e-5), 100))
    assert (70, 0) in [one.shares for one in found]
    assert 2 <= len(found) <= 3


def trace(num_batches=30, size=64, keys=400):
    rng = np.random.default_rng(0)
    lengths = np.ones((2, size), np.int32)
    return [
        IdBatch.from_features([0, 0], np.minimum(rng.zipf(1.3, 2 * size), keys), lengths)
        for _ in range(num_batches)
    ]


def settings_of(num_workers, cache=1000):
    return ScheduleSettings(
        Topology(num_workers, colocated=True), RowSizes((64,), (4,)), (1,) * num_workers, CacheSettings(cache)
    )


def proposed(speeds, compute, dense_bytes=1000, cache=1000, **costs):
    links = MeasuredLinks(tuple(speeds), (1e-5,) * len(speeds))
    given = candidates.Costs(tuple(compute), dense_bytes, **costs)
    return {
        one.kind: one.shares
        for one in candidates.propose(settings_of(len(speeds), cache), trace(), links, given)
    }


def test_one_machine_is_always_proposed_and_slow_links_are_left_out_of_the_best_subset():
    found = proposed([1e6, 1e6, 1e3, 1e3], [1e-3] * 4)
    assert found["one machine"] == (64, 0, 0, 0)
    assert found["2 workers, equal shares"] == (32, 32, 0, 0)
    assert len(found) <= 3


def test_two_equal_workers_leave_two_candidates():
    found = proposed([1e9, 1e9], [1e-3] * 2)
    assert found == {"one machine": (64, 0), "2 workers, equal shares": (32, 32)}


def test_rank_0_is_in_every_subset_even_if_it_is_slow():
    found = proposed([1e4, 1e9, 1e9], [1e-3] * 3, dense_seconds=0.001)
    assert found["one machine"] == (64, 0, 0)
    assert all(shares[0] for kind, shares in found.items() if "workers, equal" in kind)


def test_a_worker_that_computes_slowly_gets_fewer_samples():
    found = proposed([1e9, 1e9], [1e-3, 3e-3])
    assert found["unequal shares"][0] > 1.5 * found["unequal shares"][1] > 0


def test_shares_whose_rows_hardly_fit_into_a_cache_are_not_proposed():
    most = max(len(np.unique(one.keys)) for one in trace())
    found = proposed([1e9, 1e9], [1e-3] * 2, cache=most + 2)
    assert "one machine" not in found
    assert found["2 workers, equal shares"] == (32, 32)


def test_shares_are_proposed_only_where_every_batch_part_fits():
    """Two ids a sample: 128 rows at most; a cache that just does for the first batches is not enough."""
    most = max(len(np.unique(one.keys)) for one in trace())
    assert most < 100
    assert "one machine" in proposed([1e9, 1e9], [1e-3] * 2, cache=128)
    assert "one machine" not in proposed([1e9, 1e9], [1e-3] * 2, cache=int(most / 0.75))
    assert "one machine" in proposed([1e9, 1e9], [1e-3] * 2, cache=int(most / 0.6))


@pytest.mark.parametrize("seconds", [0.0, 1e9])  # on a slow machine few batches are simulated
def test_later_batches_of_the_trace_must_fit_too(seconds, monkeypatch):
    monkeypatch.setattr(candidates, "SEARCH_SECONDS", seconds)
    wide = IdBatch.from_features([0, 0], np.arange(1000, 1128), np.ones((2, 64), np.int32))
    links, costs = MeasuredLinks((1e9, 1e9), (1e-5,) * 2), candidates.Costs((1e-3, 1e-3), 1000)
    batches = [*trace(20), wide]
    found = candidates.propose(settings_of(2, 120), batches, links, costs)
    assert [one.shares for one in found] == [(32, 32)]


def test_shares_that_were_given_up_are_not_proposed_again():
    links, costs = MeasuredLinks((1e9,) * 4, (1e-5,) * 4), candidates.Costs((1e-3,) * 4, 1000)
    found = candidates.propose(settings_of(4), trace(), links, costs, 32)
    assert [one.shares for one in found] == [(16,) * 4]
    found = candidates.propose(settings_of(4), trace(), links, costs, 10)  # those the run has anyway
    assert [one.shares for one in found] == [(16,) * 4]


def test_costs_of_workers_that_are_left_out_are_those_known_before():
    one = np.zeros((3, len(MEASURES)))
    one[:, MEASURES.index("compute")] = [0.2, 0.4, 0.6]
    one[:, MEASURES.index("all_reduce")] = [0.5, 0.3, 0.7]
    one[:, MEASURES.index("samples")] = 10
    before = candidates.Costs.observed([one], 7, shared_links=False)
    assert before == candidates.Costs((0.02, 0.04, 0.06), 7, 0.3)
    one[1:] = 0
    after = candidates.Costs.observed([one], 7, shared_links=False, before=before)
    assert after == candidates.Costs((0.02, 0.04, 0.06), 7, 0.3)
