"""`rowhaul verify`: it says "exact" of what is, and finds a single number that is not."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rowhaul.cli.verify_report import print_report
from rowhaul.data.files import find_schema
from rowhaul.pruning.comparison import compare_pruned
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.training import layout_of, only_collection
from rowhaul.train.trainer import make_model
from rowhaul.verify.comparison import TableRows, compare
from rowhaul.verify.verify import Recorded, train_alone

SMALL = (
    *("--batch-size", "300", "--set", "model.embedding_dim=4", "--set", "model.options.top=[16]"),
    *("--workers", "2", "--cache", "2500"),
)
KINDS = ("rows", "optimizer state", "dense weights", "losses")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A generated log of 2,000 samples."""
    folder = tmp_path_factory.mktemp("verify") / "logs"
    command = ["generate", "--rows", "2_000", "--test-share", "0", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "rowhaul", *command], check=True, capture_output=True, timeout=60)
    return folder


def run_verify(logs, *arguments, timeout=110):
    command = [sys.executable, "-m", "rowhaul", "verify", "--data", str(logs), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    "arguments",
    [("--stores", "1", "--steps", "5"), ("--colocated", "--steps", "20")],
    ids=["store", "colocated"],
)
def test_ranks_train_what_one_process_does(logs, tmp_path, arguments):
    done = run_verify(logs, "--work", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for kind in KINDS:
        (line,) = [line for line in lines if line.startswith(f"{kind}  ")]
        assert line.rstrip().endswith("equal to the bit")
        assert 0 <= float(line.removeprefix(kind).split()[0]) < 1e-9
    assert any(line.startswith("exact: ") for line in lines)
    assert "in float64" in done.stdout
    assert "evict push" in done.stdout  # the caches are too small, or this shows little
    assert ("7 batches of 300 samples, not the 20 asked for" in done.stdout) == ("20" in arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)  # it starts three processes and trains three times
def test_ranks_prune_and_train_what_one_process_does(logs, tmp_path):
    """Over several prunings and past the cold start, to the middle of a period."""
    options = ("period=3", "cold_start=4", "dims=3", "chunks=2", "two_dimensions=false")
    settings = [word for one in options for word in ("--set", f"prune.{one}")]
    done = run_verify(
        logs, "--work", str(tmp_path), "--colocated", "--steps", "5", "--prune", "70%", *settings, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in (*KINDS, "chunks that there are", "utilities"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}  ")]
        assert "equal to the bit" in line
    assert "exact: the ranks trained the same model" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def pruned_alone(log_folder):
    prune = {"ratio": "50%", "chunks": 2, "period": 2, "two_dimensions": False}
    given = {"batch_size": 500, "precision": "float64", "model": {"embedding_dim": 4}, "max_steps": 3}
    config, schema = TrainConfig.from_dict({**given, "prune": prune}), find_schema(log_folder)
    return train_alone(config, schema, log_folder, [np.arange(500, dtype=np.int32) % 2] * 3)


def changed_rows(trained, **parts):
    rows = [replace(trained.pruned[0], **parts), *trained.pruned[1:]]
    return replace(trained, pruned=rows)


def test_a_chunk_too_many_and_a_number_off_are_found(pruned_alone):
    rows = pruned_alone.pruned[0]
    assert compare_pruned(pruned_alone, pruned_alone).is_equal
    row, place = np.argwhere(rows.present)[5]
    present, values = rows.present.copy(), rows.values.copy()
    present[row, place] = False
    comparison = compare_pruned(changed_rows(pruned_alone, present=present), pruned_alone)
    assert (comparison.chunks.largest, comparison.num_other) == (1, 1)
    assert comparison.chunks.where == f"key {rows.keys[row]} of table {pruned_alone.layout.rows[0].name}"
    assert not comparison.is_equal
    values[row, place, 1] += 1e-6
    comparison = compare_pruned(changed_rows(pruned_alone, values=values), pruned_alone)
    assert comparison.rows.largest == pytest.approx(1e-6)
    assert comparison.chunks.is_none
    columns = tuple(tuple(reversed(range(4))) for _ in pruned_alone.layout.rows)
    other = replace(pruned_alone, layout=replace(pruned_alone.layout, columns=columns))
    assert not compare_pruned(other, pruned_alone).is_equal


def test_rows_read_ahead_are_no_difference_unless_they_were_trained(pruned_alone):
    rows = pruned_alone.pruned[0]
    place = int(np.flatnonzero(rows.present.any(axis=1))[0])
    without = {name: np.delete(getattr(rows, name), place, axis=0) for name in vars(rows)}
    lost = changed_rows(pruned_alone, **without)
    assert compare_pruned(lost, pruned_alone).only_expected == 1
    comparison = compare_pruned(pruned_alone, lost)  # it was trained
    assert (comparison.only_found, comparison.is_equal) == (1, False)
    layout = pruned_alone.layout
    fresh = RowMemory(layout)
    first = [
        fresh.groups[number].arena.read(fresh.groups[number].make_fresh(np.array([at]), np.array([2**60])))[0]
        for number, at in (fresh.place_of(chunk) for chunk in range(2))
    ]
    more = {
        "keys": np.append(rows.keys, 2**60),
        "present": np.concatenate([rows.present, [[True, True]]]),
        "values": np.concatenate([rows.values, [[one[:2] for one in first]]]),
        "state": np.concatenate([rows.state, [[[one[2], 0, 0] for one in first]]]),
        "utilities": np.concatenate([rows.utilities, np.zeros((1, 2), np.float32)]),
    }
    assert compare_pruned(changed_rows(pruned_alone, **more), pruned_alone).is_equal
    more["values"][-1, 0, 0] += 1
    assert not compare_pruned(changed_rows(pruned_alone, **more), pruned_alone).is_equal


@pytest.fixture(scope="module")
def alone(log_folder):
    """What one process trains, and of which tables."""
    config = TrainConfig.from_dict(
        {"batch_size": 500, "precision": "float64", "model": {"embedding_dim": 4}, "max_steps": 3}
    )
    schema = find_schema(log_folder)
    layout = layout_of(only_collection(make_model(config, schema)))
    return layout, train_alone(config, schema, log_folder)


def changed(trained, table, change):
    """A training of which one table's rows are different."""
    rows = list(trained.rows)
    rows[table] = change(TableRows(rows[table].keys.copy(), rows[table].records.copy()))
    return replace(trained, rows=rows)


@pytest.mark.parametrize(("column", "kind"), [(1, "rows"), (-1, "optimizer state")])
def test_one_corrupted_number_is_found_and_named(alone, column, kind):
    layout, trained = alone

    def corrupt(rows):
        rows.records[7, column] += 1e-6
        return rows

    found = changed(trained, 1, corrupt)
    comparison = compare(layout, found, trained)
    assert not comparison.is_equal
    assert list(comparison.beyond("float64")) == [kind]
    difference = comparison.kinds()[kind]
    assert difference.largest == pytest.approx(1e-6)
    assert difference.where == f"key {trained.rows[1].keys[7]} of table {layout.specs[1].name}"
    assert (comparison.only_found, comparison.only_expected) == (0, 0)


def test_a_lost_row_is_found_on_either_side(alone):
    layout, trained = alone
    lossy = changed(trained, 0, lambda rows: TableRows(rows.keys[1:], rows.records[1:]))
    here, there = compare(layout, lossy, trained), compare(layout, trained, lossy)
    assert (here.only_found, here.only_expected) == (0, 1)
    assert (there.only_found, there.only_expected) == (1, 0)
    assert here.rows.where == f"key {trained.rows[0].keys[0]} of table {layout.specs[0].name}"
    assert "rows" in here.beyond("float64")
    assert here.rows.largest == there.rows.largest


def test_a_row_that_was_never_trained_is_no_difference(alone):
    layout, trained = alone
    untrained = layout.groups()  # memory in which rows are made as everywhere
    spec = layout.specs[0]
    group = next(one for one in untrained if spec in one.tables)
    location = group.make_fresh(np.array([group.tables.index(spec)]), np.array([2**60]))
    record = group.arena.read(location)
    more = changed(
        trained,
        0,
        lambda rows: TableRows(np.append(rows.keys, 2**60), np.concatenate([rows.records, record])),
    )
    assert compare(layout, more, trained).is_equal
    assert compare(layout, trained, more).is_equal


def test_what_is_no_number_is_far_from_all_else(alone):
    layout, trained = alone

    def spoil(rows):
        rows.records[0, 0] = np.nan
        return rows

    spoiled = changed(trained, 0, spoil)
    assert compare(layout, spoiled, trained).rows.largest == np.inf
    assert compare(layout, spoiled, spoiled).is_equal


def test_missing_steps_and_dense_weights_are_differences(alone):
    layout, trained = alone
    shorter = replace(trained, losses=trained.losses[:-1])
    assert compare(layout, shorter, trained).losses.where == "step 3"
    name, weights = next(iter(trained.dense.items()))
    other = replace(trained, dense={**trained.dense, name: weights + 1e-8})
    comparison = compare(layout, other, trained)
    assert list(comparison.beyond("float64")) == ["dense weights"]
    assert name in comparison.dense.where


def reported(alone, capsys, found, *, sync="on-demand", precision="float64"):
    """Whether a training passes, and what the command says; one process has trained the replay, too."""
    layout, trained = alone
    config = TrainConfig.from_dict({"max_steps": 3, "precision": precision, "cluster": {"sync": sync}})
    recorded = Recorded(found, [], {"miss_pull": 1234, "evict_push": 0}, 1, 4, 2, 1)
    comparison = compare(layout, found, trained)
    passes = print_report(config, recorded, comparison, None if "bounded" in sync else comparison)
    return passes, capsys.readouterr().out


def test_the_verdict_names_the_row_that_differs(alone, capsys):
    _, trained = alone
    assert reported(alone, capsys, trained)[0]

    def corrupt(rows):
        rows.records[7, 0] += 1e-6
        return rows

    for precision in ("float64", "float32"):
        passes, out = reported(alone, capsys, changed(trained, 1, corrupt), precision=precision)
        assert not passes
        assert "NOT exact" in out
        assert f"key {trained.rows[1].keys[7]} of table item" in out
        assert "hit ratio                      25.0%" in out
        assert "miss pull 1,234" in out
        assert "evict push" not in out


def test_what_is_not_exact_by_design_is_no_failure(alone, capsys):
    _, trained = alone
    other = replace(trained, losses=trained.losses + 0.5)
    passes, out = reported(alone, capsys, other, sync="bounded:2")
    assert passes
    assert "not exact, by design" in out
    assert "to the bit" not in out


def test_a_difference_ends_with_exit_code_1(rowhaul, log_folder, monkeypatch):
    monkeypatch.setattr("rowhaul.cli.verify._Task.launch_and_compare", lambda task: False)
    assert rowhaul("verify", "--data", log_folder)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "0"), "--steps must be at least 1; got 0"),
        (("--data", "nowhere.parquet"), "no such file: nowhere.parquet"),
        (("--work", "no/such/folder"), "make it first"),
        (("--precision", "float16"), "precision must be one of float32, float64"),
        (("--set", "cluster.sink=full"), "did you mean"),
    ],
)
def test_bad_input_is_told_before_anything_starts(rowhaul, log_folder, arguments, words):
    data = () if "--data" in arguments else ("--data", log_folder)
    code, out, err = rowhaul("verify", *data, *arguments)
    assert code == 2
    assert words in " ".join(err.split())
    assert out == ""
