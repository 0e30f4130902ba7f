"""Workers whose caches are on cards train what workers with caches in host memory do, and one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cluster_checks import check_run
from exact_cases import KEYS, cases, changing_rate, random_samples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Rank, run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case, row_sizes

from rowhaul.nn import EmbeddingBagConfig, PoolingType
from rowhaul.nn.features import FeatureGroup
from rowhaul.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from rowhaul.schedule import CacheSettings, ScheduleSettings, Topology
from slow_cases import mostly_slow

pytest.importorskip("triton", reason="Triton is not installed: `pip install rowhaul[gpu]`")

from rowhaul.device.host_indexed.layout import CardLayout
from rowhaul.device.host_indexed.messages import Uploads
from rowhaul.device.host_indexed.tables import CardTables
from rowhaul.device.launch import runs_interpreted
from rowhaul.train.distributed.tables import layout_of

DEVICE = torch.device("cpu" if runs_interpreted() else "cuda")
RULES = [SGD(0.1, weight_decay=0.01), Adagrad(0.1), RowwiseAdagrad(0.1, weight_decay=0.01), Adam(0.1)]


class CardRank(Rank):
    """A rank with its cache on the card; where there is none, kernels are interpreted."""

    def make_model(self, case):
        return case.model().to(DEVICE)

    def layout(self, collection):
        return CardLayout.of(layout_of(collection), DEVICE)


def tables_of(rule, dim, dtype):
    configs = [
        EmbeddingBagConfig(
            embedding_dim=dim, name=name, feature_names=[name], data_type=getattr(torch, dtype)
        )
        for name in ("a", "b")
    ]
    group = FeatureGroup(configs, [0, dim])
    return CardTables(group, rule, 3, DEVICE, Uploads(DEVICE)), group.make_tables(rule, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 3, 8, 21])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_step_on_a_card_gives_the_bits_of_a_cpu(rule, dim, dtype):
    there, here = tables_of(rule, dim, dtype)
    random = np.random.default_rng(0)
    keys, starts = np.arange(11) * 977 - 5, np.array([0, 6, 11])
    for group in (here, there):
        group.find_or_make(keys, starts)
    for number in range(1, 4):
        chosen = random.permutation(11)[:7]
        gradients = random.normal(size=(7, dim)).astype(dtype)
        for group in (here, there):
            records, _ = group.index.find(keys, starts)
            group.update(records[chosen], gradients, 0.3 / number, number)
    for table in range(2):
        for one, other in zip(there.blocks(table), here.blocks(table), strict=True):
            order, other_order = np.argsort(one[0]), np.argsort(other[0])
            np.testing.assert_array_equal(one[0][order], other[0][other_order])
            np.testing.assert_array_equal(one[1][order], other[1][other_order])


def test_records_go_to_messages_and_back():
    """Whole ones and values alone, at any place; all others stay as they are."""
    there, here = tables_of(Adam(0.1), 3, "float32")
    keys, starts = np.arange(9), np.array([0, 9, 9])
    records = there.find_or_make(keys, starts)
    before = there.arena.read(records)
    np.testing.assert_array_equal(before, here.arena.read(here.find_or_make(keys, starts)))
    size, width = there.value_bytes, there.arena.record_bytes
    lengths = np.array([width, size, width])
    offsets = np.array([2 * size + width, 0, size])
    out = np.zeros(3 * width, np.uint8)
    there.arena.copy_out(records[[4, 0, 7]], lengths, offsets, out)
    sent = out.view(np.float32)
    np.testing.assert_array_equal(sent[:3], before[0, :3])
    np.testing.assert_array_equal(sent[3:12], before[7])
    np.testing.assert_array_equal(sent[15:24], before[4])
    there.arena.copy_in(records[[1, 2, 3]], lengths, offsets, out)
    after = there.arena.read(records)
    np.testing.assert_array_equal(after[1], before[4])
    np.testing.assert_array_equal(after[2], np.concatenate([before[0, :3], before[2, 3:]]))
    np.testing.assert_array_equal(after[3], before[7])
    np.testing.assert_array_equal(after[[0, 4, 5, 6, 7, 8]], before[[0, 4, 5, 6, 7, 8]])


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize(
    ("sync", "peer_to_peer"),
    mostly_slow(
        [("on-demand", False), ("on-demand", True), ("full", False), ("static", False), ("bounded:0", False)],
        ("static", False),
    ),
)
@settings(
    max_examples=2,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_workers_with_caches_on_cards_train_what_one_process_trains(sync, peer_to_peer, data):
    """With hot rows, policies, evictions and changing rates: all that cases have."""
    check_case(data.draw(cases(sync, peer_to_peer)))


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel_at_a_time")
@pytest.mark.parametrize("num_stores", mostly_slow([0, 1], 0))
def test_peers_step_rows_in_each_others_caches(num_stores):
    """Rates of Adam differ by iteration, and gradients of several workers meet on a card."""
    topology = Topology(3, num_stores, colocated=num_stores == 0, peer_to_peer=True)
    check_case(small_case(topology, "on-demand"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_kernel_at_a_time")
def test_gradients_accumulate_on_cards_as_in_host_memory():
    """With bounded staleness, which no single process replays, workers with cards equal those without."""
    case = small_case(Topology(3, 1), "bounded:2")
    found, expected = run_cluster(case, kind=CardRank), run_cluster(case)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=0, atol=1e-9)
    assert found.rows().keys() == expected.rows().keys()
    for row, record in expected.rows().items():
        np.testing.assert_allclose(found.rows()[row], record, rtol=0, atol=1e-9)
    check_run(case, found)


def small_case(topology, sync):
    """Two tables, Adam, caches that hold some of the rows."""
    tables = tuple(
        EmbeddingBagConfig(
            embedding_dim=dim,
            name=name,
            feature_names=[name],
            weight_init_min=-1.0,
            weight_init_max=1.0,
        )
        for name, dim in (("a", 2), ("b", 5))
    )
    rule, random = Adam(0.1), np.random.default_rng(0)
    batches = [random_samples(random, ("a", "b"), 9, KEYS, 2) for _ in range(6)]
    settings = ScheduleSettings(
        topology=topology,
        sizes=row_sizes(tables, rule, torch.float64),
        prices=(1, 2, 3),
        cache=CacheSettings(20, "rows", "lru"),
        dispatcher="round-robin",
        sync=sync,
        look_ahead=2,
    )
    return Case(tables, rule, settings, tuple(batches), rates=changing_rate)


def check_case(case):
    """Train a case with caches on cards; with sums of bags the bits are those of CPUs."""
    case = replace(case, tables=tuple(replace(one, pooling=PoolingType.SUM) for one in case.tables))
    outcome = run_cluster(case, kind=CardRank)
    if runs_interpreted():  # the dense part is on the CPU
        assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    check_run(case, outcome)


def test_a_snapshot_has_the_rows_of_its_moment_with_marks_and_without():
    there, here = tables_of(Adagrad(0.1), 3, "float32")
    keys, starts = np.arange(9), np.array([0, 5, 9])
    records = there.find_or_make(keys, starts)
    snapshot = there.snapshot()
    snapshot.mark(np.zeros(2, np.int64), records[[1, 3]])
    expected = here.arena.read(here.find_or_make(keys, starts))
    there.update(records, np.ones((9, 3), np.float32), 1.0, 1)  # after the moment
    found = {
        (table, marked): dict(zip(*(np.concatenate(one) for one in zip(*blocks, strict=True)), strict=True))
        for table in range(2)
        for marked in (False, True)
        if (blocks := list(snapshot.blocks(table, marked=marked)))
    }
    assert {place: set(rows) for place, rows in found.items()} == {
        (0, False): {0, 2, 4}, (0, True): {1, 3}, (1, False): {5, 6, 7, 8}
    }  # fmt: skip
    for rows in found.values():
        for key, record in rows.items():
            np.testing.assert_array_equal(record, expected[key])
