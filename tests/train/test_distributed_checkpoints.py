"""Checkpoints of a cluster: the same ranks go on with the same bits, others with the same model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from checkpointed_layouts import HOT, LAYOUTS, SAVED, TIGHT
from checkpointed_ranks import (
    CLUSTER,
    CONFIG,
    STEPS,
    Session,
    contents,
    largest_difference,
    on_threads,
    same_bits,
)
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.data.stream import SampleStream
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.train import load_trained, train_run
from rowhaul.train.config import OptimizerConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.trainer import Trainer
from slow_cases import mostly_slow


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


# The others are slow.
QUICK = (
    "store",
    "peer to peer, lru, adam",
    "co-located, peers, belady",
    "hot rows",
    "bounded:2",
    "admission",
    "at home, adam, shares",
)


AT_HOME = {"sync": "at-home", "colocated": True, "dispatcher": "round-robin", "cache": "1GiB"}


def checkpoint(folder, step):
    return CheckpointReader(folder / CHECKPOINTS / f"step-{step:09d}")


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, *QUICK))
def test_the_same_cluster_goes_on_with_the_same_bits(layout, session, tmp_path):
    chosen = replace(session, **LAYOUTS[layout])
    chosen.on_threads(tmp_path / "a")
    chosen.interrupted(tmp_path / "b", at=SAVED)
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    if chosen.cluster.cache == TIGHT.cache:
        kinds = {kind for kind, *_ in _pieces(checkpoint(tmp_path / "b", SAVED))}
        assert kinds == {"cache", "waiting-in-cache", "home", "absent", "waiting-at-home"}


@pytest.mark.slow
def test_saving_changes_nothing(session, tmp_path):
    session.on_threads(tmp_path / "a")
    replace(session, save_at=range(1, STEPS + 1)).on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    assert len(finished_checkpoints(tmp_path / "b" / CHECKPOINTS)) == STEPS


@pytest.mark.slow
def test_control_records_that_were_decided_come_into_force_after_resuming(session, tmp_path):
    """And those decided later are numbered on."""
    posted = {0: ("shares", (2, 1, 1)), 4: ("shares", (1, 5, 2)), 7: ("dispatcher", "round-robin")}
    pauses = (1, 4, 5, 7)
    chosen = replace(session, posted=posted, pauses=pauses)
    chosen.on_threads(tmp_path / "a")
    chosen.interrupted(tmp_path / "b", at=5)  # in force from 6 on
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    replace(session, pauses=pauses).on_threads(tmp_path / "c")
    assert not same_bits(contents(tmp_path / "a"), contents(tmp_path / "c")), "records do nothing here"
    other = replace(CLUSTER, stores=2)
    chosen.interrupted(tmp_path / "d", at=5, cluster=other)
    assert largest_difference(contents(tmp_path / "a"), contents(tmp_path / "d")) < 1e-9


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_slow(
        [
            ({}, {"workers": 4}),
            ({"stores": 2}, {"workers": 1}),
            ({"peer_to_peer": True}, {"workers": 2, "stores": 3, "peer_to_peer": True}),
            ({"colocated": True}, {"workers": 3}),
            ({}, {"workers": 4, "colocated": True, "peer_to_peer": True}),
            ({}, {"dispatcher": "random"}),
            ({"sync": "full"}, {"cache": "1MiB"}),
            ({}, {"look_ahead": 0}),
            ({"first_touch": False}, {}),
            ({"sync": "bounded:0"}, {"workers": 2}),
            (AT_HOME, {"workers": 2, "stores": 2}),
            ({"peer_to_peer": True}, {**AT_HOME, "workers": 2}),
        ],
        ({"stores": 2}, {"workers": 1}),
        ({}, {"workers": 4, "colocated": True, "peer_to_peer": True}),
        ({"sync": "bounded:0"}, {"workers": 2}),
        (AT_HOME, {"workers": 2, "stores": 2}),
    ),
    ids=str,
)
def test_another_cluster_goes_on_with_the_same_model(before, after, session, tmp_path):
    session.on_threads(tmp_path / "a")
    chosen = replace(session, cluster=replace(CLUSTER, **before))
    chosen.interrupted(tmp_path / "b", at=5, cluster=replace(CLUSTER, **after))
    assert largest_difference(contents(tmp_path / "a"), contents(tmp_path / "b")) < 1e-9


def test_a_run_that_was_saved_with_caches_keeps_them_where_rows_could_stay_at_home(session, tmp_path):
    """If that makes the same bits: not with another dispatcher."""
    planned = replace(
        session, cluster=replace(CLUSTER, colocated=True, dispatcher="round-robin", cache="1GiB")
    )
    planned.on_threads(tmp_path)
    kept = []

    def look(cluster):
        trainer = Trainer(planned.config, planned.schema)
        saved = checkpointing.find(cluster, tmp_path / CHECKPOINTS, trainer)
        for dispatcher in ("round-robin", "random"):
            config = replace(planned.cluster, dispatcher=dispatcher, sync="at-home")
            settings = layout_of(trainer.collection).schedule_settings(config, cluster.topology)
            kept.append((dispatcher, saved.keep_sync(settings, may_stay_home=True).sync))

    on_threads(planned.cluster.topology(), look)
    assert set(kept) == {("round-robin", "on-demand"), ("random", "at-home")}


@pytest.mark.parametrize(("may_stay_home", "kept"), [(True, "at-home"), (False, "on-demand")])
def test_a_run_whose_rows_stayed_at_home_keeps_that_where_they_still_may(
    may_stay_home, kept, session, tmp_path
):
    """Not on a card, for example."""
    at_home = replace(session, cluster=replace(CLUSTER, **AT_HOME))
    at_home.on_threads(tmp_path)

    def look(cluster):
        trainer = Trainer(at_home.config, at_home.schema)
        saved = checkpointing.find(cluster, tmp_path / CHECKPOINTS, trainer)
        settings = layout_of(trainer.collection).schedule_settings(
            replace(at_home.cluster, sync="auto"), cluster.topology
        )
        assert settings.sync == "on-demand"
        return saved.keep_sync(settings, may_stay_home=may_stay_home).sync

    assert set(on_threads(at_home.cluster.topology(), look)) == {kept}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(HOT, []), ([], HOT), (HOT[:2], HOT[1:])], ids=["-", "+", "+-"]
)
def test_other_rows_may_be_hot_afterwards(before, after, session, tmp_path):
    session.on_threads(tmp_path / "a")
    replace(session, hot=before).interrupted(tmp_path / "b", at=5, hot=after)
    expected, found = contents(tmp_path / "a"), contents(tmp_path / "b")
    never_trained = f"user/{HOT[-1]}"
    found.pop(never_trained, None)
    assert largest_difference(expected, found) < 1e-9


def test_a_cluster_goes_on_from_one_process_and_the_other_way_round(session, tmp_path):
    config, schema, data = session.config, session.schema, session.data
    train_run(config, schema, data, out=tmp_path / "a")
    expected = contents(tmp_path / "a")

    stopping = iter(range(1, 100))
    train_run(config, schema, data, out=tmp_path / "b", should_stop=lambda: next(stopping) >= 5)
    replace(session, resume=True).on_threads(tmp_path / "b")
    assert largest_difference(expected, contents(tmp_path / "b")) < 1e-9

    replace(session, save_at=[5]).on_threads(tmp_path / "c")
    one = replace(config, cluster=replace(CLUSTER, workers=0))
    assert train_run(one, schema, data, out=tmp_path / "c", resume=True).step == STEPS
    assert largest_difference(expected, contents(tmp_path / "c")) < 1e-9


def test_one_process_evaluates_what_a_cluster_has_learned(session, tmp_path):
    session.on_threads(tmp_path / "a")
    train_run(session.config, session.schema, session.data, out=tmp_path / "b")
    stream = SampleStream(session.data, session.schema, 500)
    metrics = [load_trained(tmp_path / name).evaluate(stream) for name in "ab"]
    assert metrics[0].log_loss == pytest.approx(metrics[1].log_loss, abs=1e-9)


def test_the_sidecar_tells_what_differs(session, tmp_path):
    replace(session, save_at=[5], pauses=[5]).on_threads(tmp_path / "a")

    def look(cluster):
        trainer = Trainer(session.config, session.schema)
        saved = checkpointing.find(cluster, tmp_path / "a" / "checkpoints", trainer)
        sizes = layout_of(trainer.collection).sizes()
        same = session.cluster.schedule(cluster.topology, sizes)
        other = replace(session.cluster, cache="200", shares="1,2,1").schedule(cluster.topology, sizes)
        measured = replace(same, prices=(3, 2, 1))
        assert saved.differences(measured) == ["prices: 3, 2, 1 here, 1x3 there"]
        assert saved.differences(saved.keep_prices(measured)) == []
        return trainer.step, saved.differences(same), saved.differences(other)

    for step, same, other in on_threads(session.cluster.topology(), look):
        assert (step, same) == (5, [])
        assert other == ["cache.capacity: 200x3 here, 190x3 there", "shares: 1, 2, 1 here, 1x3 there"]


@pytest.mark.parametrize("cluster", [CLUSTER, replace(CLUSTER, colocated=True)], ids=["store", "co-located"])
def test_gradients_that_wait_under_bounded_staleness_are_in_the_model(cluster, session, tmp_path):
    """A checkpoint's row is what its home has, stepped once by all that workers have not handed in."""
    lr = 0.05
    config = replace(
        CONFIG, rows=OptimizerConfig("sgd", lr), rates=replace(CONFIG.rates, warmup_steps=0, decay="constant")
    )
    cluster = replace(cluster, sync="bounded:3", cache="1000")
    replace(session, config=config, cluster=cluster, save_at=[7], pauses=[7]).on_threads(tmp_path / "a")
    reader = checkpoint(tmp_path / "a", 7)
    tables = list(reader.tables)
    flushed = contents(tmp_path / "a", 7)
    waiting, home = {}, _initial_rows(config, session.schema, flushed)
    for kind, table, keys, records in _pieces(reader):
        rows = [f"{tables[table]}/{key}" for key in keys.tolist()]
        if kind == "home":
            home |= dict(zip(rows, records, strict=True))
        elif kind == "waiting-in-cache":
            for row, record in zip(rows, records, strict=True):
                waiting[row] = waiting.get(row, 0) + record
    assert len(waiting) > 50
    for row, gradient in waiting.items():
        assert flushed[row] == pytest.approx(home[row] - lr * gradient, abs=1e-12)


def _pieces(reader):
    """What sidecars hold: kind, table, keys, records."""
    for name in (name for files in reader.facts["cluster"]["files"] for name in files):
        if name.startswith("layout-"):
            arrays = reader.arrays(name)
            for stem in (one.removesuffix(".keys") for one in arrays if one.endswith(".keys")):
                kind, _, table = stem.split(".")
                yield kind, int(table), arrays[f"{stem}.keys"], arrays[f"{stem}.records"]


def _initial_rows(config, schema, flushed):
    """What a home that does not have these rows yet makes of them."""
    memory = RowMemory(layout_of(Trainer(config, schema).collection))
    rows = {}
    for table, spec in enumerate(memory.layout.specs):
        names = [name for name in flushed if name.startswith(f"{spec.name}/")]
        keys = np.array([int(name.partition("/")[2]) for name in names])
        number, position = memory.place_of(table)
        starts = np.where(np.arange(len(memory.groups[number].tables) + 1) > position, len(keys), 0)
        locations = memory.groups[number].find_or_make(keys, starts)
        rows |= dict(zip(names, memory.groups[number].arena.read(locations), strict=True))
    return rows
