"""A cluster that saves while it trains writes what one that stops to save writes, and learns the same."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import checkpointed_ranks
from checkpointed_layouts import HOT, LAYOUTS, SAVED
from checkpointed_ranks import STEPS, Session, contents, same_bits, tracking
from rowhaul.checkpoint import CheckpointReader
from rowhaul.runtime import flush
from rowhaul.train.distributed.cluster_snapshot import ClusterSnapshot
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.save_thread import Pacer, SaveCancelledError
from slow_cases import mostly_slow

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


@pytest.fixture
def slowly(monkeypatch):
    """Slow the writing threads down to a table or two per training step."""
    steps, calls = threading.Semaphore(0), []

    def wait_for_a_step(pacer):
        calls.append(steps.acquire(blocking=False))
        while not pacer._hurries.is_set() and not calls[-1]:
            calls[-1] = steps.acquire(timeout=0.02)
        if pacer._ended:
            raise SaveCancelledError

    monkeypatch.setattr(Pacer, "__call__", wait_for_a_step)
    checkpointed_ranks.stepped.append(steps.release)
    yield calls
    checkpointed_ranks.stepped.clear()


def everything(folder, step):
    """All that a checkpoint of a cluster holds, in no order."""
    reader = CheckpointReader(folder / CHECKPOINTS / f"step-{step:09d}")
    reader.verify()
    found = {name: one.tobytes() for name, one in contents(folder, step).items()}
    found |= {f"fact {name}": value for name, value in reader.facts.items() if name != "cluster"}
    found |= {
        f"fact of cluster {name}": value for name, value in reader.facts["cluster"].items() if name != "files"
    }
    for rank, names in enumerate(reader.facts["cluster"]["files"]):
        for name in names:
            if name.startswith("rows-"):
                continue
            if not name.startswith("layout-"):
                tensors = name.startswith("tensors-")
                group = name.removeprefix("tensors-").removesuffix(".safetensors")
                arrays = (
                    {key: one.numpy() for key, one in reader.tensors(group).items()}
                    if tensors
                    else reader.arrays(name)
                )
                found |= {f"{name}/{key}": one.tobytes() for key, one in arrays.items()}
                continue
            arrays = reader.arrays(name)
            for stem in (one.removesuffix(".keys") for one in arrays if one.endswith(".keys")):
                keys, records = arrays[f"{stem}.keys"], arrays[f"{stem}.records"]
                if not len(records):
                    records = np.zeros((len(keys), 0))
                found |= {
                    f"{rank} {stem} {key}": record.tobytes()
                    for key, record in zip(keys.tolist(), records, strict=True)
                }
    return found


QUICK = (
    "store",
    "co-located, peers, belady",
    "bounded:2",
    "rows that are forgotten",
    "at home",
)
CASES = mostly_slow(LAYOUTS, *QUICK)


@pytest.mark.parametrize("layout", CASES)
def test_it_is_the_checkpoint_of_its_step_and_the_run_goes_on_with_the_same_bits(
    layout, session, tmp_path, slowly
):
    chosen = replace(session, **LAYOUTS[layout])
    replace(chosen, save_at=[SAVED, STEPS]).on_threads(tmp_path / "stopped")
    slowly.clear()
    replace(chosen, beside=[SAVED]).on_threads(tmp_path / "beside")
    assert sum(slowly) > 3, "nothing was trained while it was written"
    assert everything(tmp_path / "beside", SAVED) == everything(tmp_path / "stopped", SAVED)
    expected = contents(tmp_path / "stopped")
    assert same_bits(expected, contents(tmp_path / "beside"))
    last = tmp_path / "beside" / CHECKPOINTS / f"step-{STEPS:09d}"
    last.rename(tmp_path / "last")
    replace(chosen, resume=True).on_threads(tmp_path / "beside")
    assert same_bits(expected, contents(tmp_path / "beside"))
    assert not any(thread.name == "rowhaul-save" for thread in threading.enumerate())


def test_hot_rows_may_change_while_it_is_written(session, tmp_path, slowly):
    chosen = replace(session, hot=HOT[:2], replicated={6: HOT[1:4]}, pauses=(6, STEPS))
    replace(chosen, save_at=[3, STEPS]).on_threads(tmp_path / "stopped")
    replace(chosen, beside=[3], finish_at=[STEPS]).on_threads(tmp_path / "beside")
    assert everything(tmp_path / "beside", 3) == everything(tmp_path / "stopped", 3)
    assert same_bits(contents(tmp_path / "stopped"), contents(tmp_path / "beside"))


def test_rows_are_flushed_in_slices(session, tmp_path, monkeypatch):
    for name in ("co-located, peers, belady", "bounded:2"):
        chosen = replace(session, **LAYOUTS[name], save_at=[SAVED, STEPS])
        chosen.on_threads(tmp_path / name / "one")
        with monkeypatch.context() as patch:
            patch.setattr(flush, "SLICE_ROWS", 7)
            chosen.on_threads(tmp_path / name / "many")
        for step in (SAVED, STEPS):
            one, many = (everything(tmp_path / name / folder, step) for folder in ("one", "many"))
            assert one == many


def test_the_next_save_is_left_out_while_one_is_under_way(session, tmp_path, slowly):
    replace(session, beside=[3, 5, 11], finish_at=[11]).on_threads(tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a" / CHECKPOINTS).iterdir())
    assert names == ["step-000000003", "step-000000011", "step-000000012"]


def test_if_one_rank_cannot_write_all_go_on(session, tmp_path, monkeypatch):
    write = ClusterSnapshot._write_part

    def fail_once(self, folder, pace):
        if self._cluster.rank == 1 and self._step == 3:
            raise OSError("No space left on device")
        write(self, folder, pace)

    monkeypatch.setattr(ClusterSnapshot, "_write_part", fail_once)
    checkpointed_ranks.saves.clear()
    replace(session, beside=[3, 6]).on_threads(tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a" / CHECKPOINTS).iterdir())
    assert names == ["step-000000006", "step-000000012"]
    ended = sorted((step, rank) for rank, step, _ in checkpointed_ranks.saves)
    assert ended == [(step, rank) for step in (3, 6) for rank in range(4)]
    for _, step, error in checkpointed_ranks.saves:
        assert (error is None) == (step == 6)
        if error is not None:
            assert "no checkpoint of step 3: rank 1 (worker 1) could not write its part" in str(error)
            assert "No space left on device" in str(error)
    session.on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))


def test_where_rank_0_cannot_begin_all_go_on(session, tmp_path):
    """The loop reports what rank 0 raises; here the test does."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / CHECKPOINTS).write_text("in the way")
    with pytest.raises(Exception, match="rank 0 cannot write to"):
        replace(session, beside=[3]).on_threads(tmp_path / "a")


@pytest.mark.parametrize(
    "layout", ["co-located, peers, belady", "hot rows", "bounded:2", "rows that are forgotten"]
)
def test_all_ranks_together_know_the_rows_that_have_changed(layout, session, tmp_path, monkeypatch):
    taken, take = [], ClusterSnapshot.__init__

    def kept(self, *arguments, **more):
        take(self, *arguments, **more)
        taken.append(self)

    monkeypatch.setattr(ClusterSnapshot, "__init__", kept)
    monkeypatch.setattr(checkpointed_ranks, "distribute", tracking)
    replace(session, **LAYOUTS[layout], save_at=[3, 6, STEPS]).on_threads(tmp_path / "a")
    dense = ("model/", "dense-optimizer/")
    saved = {
        step: {
            name: row.tobytes()
            for name, row in contents(tmp_path / "a", step).items()
            if not name.startswith(dense)
        }
        for step in (3, 6, STEPS)
    }
    for before, step in ((3, 6), (3, STEPS), (6, STEPS)):
        rows = [
            f"{table}/{key}"
            for one in taken
            if one._step == step
            for table, keys in one.changed_since(before)
            for key in keys.tolist()
        ]
        assert len(set(rows)) == len(rows), "a row was named twice"
        every = saved[step].keys() | saved[before].keys()
        differs = {row for row in every if saved[step].get(row) != saved[before].get(row)}
        if layout == "bounded:2":  # a row whose updates wait counts as changed
            assert set(rows) >= differs
            continue
        assert set(rows) & every == differs
        assert set(rows) == differs or layout == "rows that are forgotten"
        assert len(differs) > 10
