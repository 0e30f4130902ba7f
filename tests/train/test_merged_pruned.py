"""Pruned checkpoints merged: a dictionary of rows updated, in the memory that one of them may take."""

import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from test_pruned_checkpoints import PRUNED, TIGHT, everything
from test_pruned_checkpoints import same_bits as same

from checkpointed_ranks import STEPS, Session
from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.checkpoint.merging import merge
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.cli.ckpt.merge import merge_into_folder
from rowhaul.errors import CheckpointError
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.config import PruneConfig
from rowhaul.pruning.deciding import room as rooms
from rowhaul.pruning.deciding.hashing import DistinctCounter
from rowhaul.pruning.deciding.room import chunk_starts
from rowhaul.train import train_run

DIM, CHUNKS = 6, 3
HALF = PruneSettings(ratio=0.5, chunks=CHUNKS, decay=0.5)


def write(
    path, first, last, *, seed, step, share=0.5, settings=HALF, columns=DIM, tables=("a", "b"), facts=None
):
    """A checkpoint of random rows of keys from ``first`` to ``last``, none of them forgotten."""
    random = np.random.default_rng(seed)
    keys = random.permutation(np.arange(first, last))
    starts = chunk_starts(columns, settings.chunks)
    with CheckpointWriter(path) as writer:
        for name in tables:
            present = random.random((len(keys), settings.chunks)) < share
            width = int(np.diff(starts).max())
            block = {
                "keys": keys,
                "present": present,
                "chunks": random.normal(size=(int(present.sum()), width)).astype(np.float32),
                "utilities": random.random(present.shape).astype(np.float32),
                "touched": random.integers(step - 3, step + 1, len(keys)).astype(np.int32),
            }
            cut = {"columns": np.arange(columns), "starts": starts}
            pieces = np.array_split(np.arange(len(keys)), 3)
            ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
            blocks = [
                {**{part: block[part][some] for part in block if part != "chunks"},
                 "chunks": block["chunks"][ends[some[0]] : ends[some[-1] + 1]], **cut}
                for some in pieces
            ]  # fmt: skip
            writer.blocks(name, blocks, DIM, 0, "float32", "chunked")
        numbers = np.array([len(tables) * len(keys), 1, step, step, 0, 0, 0])
        known = {"registers": DistinctCounter().registers, "numbers": numbers, "sums": np.zeros((2, 0))}
        known["columns"] = np.tile(np.arange(columns), (len(tables), 1))
        writer.arrays("pruning", {f"0.{name}": one for name, one in known.items()})
        writer.facts = {"row_optimizer": "sgd", "step": step, **(facts or {})}
        how = {"chunks": settings.chunks, "file": "pruning.safetensors", "settings": asdict(settings)}
        writer.facts.setdefault("pruning", how)
    return CheckpointReader(path)


def write_whole(path):
    with CheckpointWriter(path) as writer:
        for name in ("a", "b"):
            writer.table(name, [(np.arange(9), np.zeros((9, DIM), np.float32))], DIM, 0, "float32")
        writer.facts = {"row_optimizer": "sgd", "step": 5}
    return CheckpointReader(path)


def rows_of(reader, now):
    """What is known of every row, utilities as they are at the step that the checkpoint is of."""
    found = {}
    for table in reader.tables:
        for parts in reader.blocks(table):
            ends = np.concatenate([[0], np.cumsum(parts["present"].sum(axis=1))])
            for row, key in enumerate(parts["keys"].tolist()):
                held = parts["chunks"][ends[row] : ends[row + 1]].tobytes()
                useful = parts["utilities"][row] * 0.5 ** (now - float(parts["touched"][row]))
                found[table, key] = (parts["present"][row].tolist(), held, useful.tolist())
    return found


def num_chunks(reader):
    return sum(int(parts["present"].sum()) for name in reader.tables for parts in reader.blocks(name))


@pytest.mark.parametrize("file_bytes", [500, 1 << 20])
def test_merging_is_updating_a_dictionary_of_pruned_rows(file_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    one = write(tmp_path / "1", 0, 100, seed=1, step=50, share=0.2)
    two = write(tmp_path / "2", 60, 180, seed=2, step=7, share=0.3)
    done = []
    made = merge(
        [one, two], tmp_path / "to", lambda some, total: done.append((some, total)), keys_in_memory=20
    )
    found = CheckpointReader(tmp_path / "to")
    found.verify()
    assert rows_of(found, 7) == {**rows_of(one, 50), **rows_of(two, 7)}
    assert [(table.rows, table.rows_from, table.replaced) for table in made.tables] == [
        (180, (60, 120), 40)
    ] * 2
    assert (made.num_dropped, done[-1]) == (0, (2 * 440, 2 * 440))
    known = found.arrays("pruning.safetensors")
    assert known["0.numbers"][:4].tolist() == [360, 1, 7, 7]  # all rows, as of the last one's step


def test_what_there_is_no_room_for_is_the_least_useful(tmp_path, monkeypatch):
    monkeypatch.setattr(rooms.room_for, "__defaults__", (300,))  # entries that are always allowed
    one = write(tmp_path / "1", 0, 100, seed=1, step=50, share=0.6)
    two = write(tmp_path / "2", 60, 180, seed=2, step=7, share=0.6)
    made = merge([one, two], tmp_path / "to")
    found = CheckpointReader(tmp_path / "to")
    assert num_chunks(found) == 360 * CHUNKS // 2  # half of the pieces of all rows
    assert made.num_dropped > 0
    before = {**rows_of(one, 50), **rows_of(two, 7)}
    after = rows_of(found, 7)
    kept, gone = [], []
    for row, (present, _, useful) in before.items():
        holds = after[row][0] if row in after else [False] * CHUNKS
        assert all(was or not held for was, held in zip(present, holds, strict=True))
        kept += [value for value, held in zip(useful, holds, strict=True) if held]
        gone += [value for value, was, held in zip(useful, present, holds, strict=True) if was and not held]
    assert len(gone) == made.num_dropped
    assert max(gone) <= min(kept)
    lost = sum(table.dropped for table in made.tables)
    assert lost == sum(row not in after for row in before) > 0  # 360 rows in 300 entries
    assert all(any(present) for present, _, _ in after.values())
    assert found.arrays("pruning.safetensors")["0.numbers"][1] == 0  # no longer every row that was seen


def test_pruned_checkpoints_that_do_not_go_together_are_refused(tmp_path):
    one = write(tmp_path / "1", 0, 9, seed=1, step=5)
    cases = {
        "pruned with 3 chunks a row and .* with 2: chunks of one size cannot become": write(
            tmp_path / "2", 0, 9, seed=1, step=5, settings=replace(HALF, chunks=2)
        ),
        "the format of the rows is (chunked|whole) in the first": write_whole(tmp_path / "3"),
        "not the same tables, only one has b": write(tmp_path / "4", 0, 9, seed=1, step=5, tables=("a",)),
        "keeps other columns of its rows": write(tmp_path / "5", 0, 9, seed=1, step=5, columns=5),
    }
    for message, other in cases.items():
        with pytest.raises(CheckpointError, match=message):
            merge([one, other], tmp_path / "to")
        with pytest.raises(CheckpointError):
            merge([other, one], tmp_path / "to")
        assert not (tmp_path / "to").exists()


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    return replace(Session.on_log(tmp_path_factory.mktemp("merged-log"), log_schema), config=PRUNED)


def test_a_merged_checkpoint_goes_on_to_the_same_bits(session, tmp_path):
    """Of one run alone: only the files are others."""
    config = replace(
        PRUNED,
        checkpoint_every=5,
        keep_checkpoints=9,
        prune=PruneConfig(ratio="60%", chunks=3, period=3, dims=3),
    )
    train_run(config, session.schema, session.data, out=tmp_path / "a")
    early = CheckpointReader(tmp_path / "a" / "checkpoints" / f"step-{5:09d}")
    merge_into_folder([early], tmp_path / "b", lambda done, total: None)
    train_run(config, session.schema, session.data, out=tmp_path / "b", resume=True)
    assert same(everything(tmp_path / "a"), everything(tmp_path / "b"))


def test_what_a_cluster_saved_merges_too(session, tmp_path):
    saved = replace(session, cluster=replace(TIGHT, colocated=True), save_at=[5, STEPS])
    saved.on_threads(tmp_path / "a")
    early, late = (CheckpointReader(tmp_path / "a" / "checkpoints" / f"step-{at:09d}") for at in (5, STEPS))
    merge_into_folder([late], tmp_path / "one", lambda done, total: None)
    assert same(everything(tmp_path / "a"), everything(tmp_path / "one"))
    merge_into_folder([late, early], tmp_path / "back", lambda done, total: None)
    shutil.rmtree(tmp_path / "a")
    session.config.write(tmp_path / "back" / "config.yaml")
    result = train_run(session.config, session.schema, session.data, out=tmp_path / "back", resume=True)
    assert result.step == STEPS
    held = num_chunks(open_checkpoint(tmp_path / "back"))
    assert held <= 0.4 * 3 * result.pruning.num_rows + 1
