"""What the ranks of a cluster publish, one delta after the other, is each checkpoint, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import checkpointed_ranks
from checkpointed_layouts import HOT, LAYOUTS
from checkpointed_ranks import STEPS, Session, contents, tracking
from rowhaul.train.distributed.changed_rows import take_changed_rows
from rowhaul.train.distributed.cluster_snapshot import ClusterSnapshot

pytestmark = pytest.mark.slow

SAVED = (3, 4, 7, STEPS)


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


@pytest.fixture
def taken(monkeypatch):
    """Changes since the checkpoint before, by step and rank."""
    found, take = {}, ClusterSnapshot.__init__

    def taking(self, cluster, training, trainer, facts, **more):
        since = max((step for step in (0, *SAVED) if step < trainer.step), default=0)
        found[trainer.step, cluster.rank] = take_changed_rows(training, since)
        take(self, cluster, training, trainer, facts, **more)

    monkeypatch.setattr(ClusterSnapshot, "__init__", taking)
    monkeypatch.setattr(checkpointed_ranks, "distribute", tracking)
    return found


def check(taken, folder):
    known = {}
    for step in SAVED:
        written, deleted = {}, set()
        for (of_step, _), changes in taken.items():
            for table, one in changes.items() if of_step == step else ():
                rows = {f"{table}/{key}": row for key, row in zip(one.keys.tolist(), one.stored, strict=True)}
                assert not rows.keys() & written.keys(), "two ranks write a row"
                written |= {name: row.tobytes() for name, row in rows.items()}
                deleted |= {f"{table}/{key}" for key in one.deleted.tolist()}
        assert not deleted & written.keys()
        known = {name: row for name, row in known.items() if name not in deleted} | written
        saved = contents(folder, step)
        dense = ("model/", "dense-optimizer/")
        assert known == {name: row.tobytes() for name, row in saved.items() if not name.startswith(dense)}
        assert len(written) > 10
        assert len(written) < len(known) or step != SAVED[1], "all rows were written"


@pytest.mark.parametrize(
    "layout",
    [
        "store",
        "peer to peer, lru, adam",
        "co-located, peers, belady",
        "hot rows, co-located",
        "bounded:2",
        "admission",
        "rows that are forgotten",
        "at home",
    ],
)
def test_changes_add_up_to_every_checkpoint(layout, session, tmp_path, taken):
    replace(session, **LAYOUTS[layout], save_at=SAVED).on_threads(tmp_path / "a")
    check(taken, tmp_path / "a")


def test_rows_that_begin_and_cease_to_be_replicated(session, tmp_path, taken):
    chosen = replace(session, hot=HOT[:2], replicated={6: HOT[1:4]}, pauses=(6, STEPS), save_at=SAVED)
    chosen.on_threads(tmp_path / "a")
    check(taken, tmp_path / "a")
