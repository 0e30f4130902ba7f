"""`rowhaul verify`: it says "exact" of what is, and finds a single number that is not."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from rowhaul.cli.verify.report import print_devices, print_report
from rowhaul.data.files import find_schema
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.row_format import format_of
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.tables import layout_of, only_collection
from rowhaul.train.trainer import make_model
from rowhaul.verify.comparison import compare
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
    subprocess.run([sys.executable, "-m", "rowhaul", *command], check=True, capture_output=True, timeout=300)
    return folder


def run_verify(logs, *arguments, timeout=300):
    command = [sys.executable, "-m", "rowhaul", "verify", "--data", str(logs), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
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
    assert "In float32, the default of `rowhaul train`, they drift apart by rounding" in done.stdout
    assert "evict push" in done.stdout  # the caches are too small, or this shows little
    assert ("7 batches of 300 samples, not the 20 asked for" in done.stdout) == ("20" in arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_prune_and_train_what_one_process_does(logs, tmp_path):
    """Over several prunings and past the cold start, to the middle of a period."""
    options = ("period=3", "cold_start=4", "dims=3", "chunks=2", "two_dimensions=false")
    settings = [word for one in options for word in ("--set", f"prune.{one}")]
    done = run_verify(
        logs, "--work", str(tmp_path), "--colocated", "--steps", "5", "--prune", "70%", *settings, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in (*KINDS, "stored chunks", "utilities"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}  ")]
        assert "equal to the bit" in line
    assert "exact: the ranks trained the same model" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("row_dtype", ["auto", "int8"])
def test_ranks_hand_rows_over_as_one_process_does(logs, tmp_path, row_dtype):
    """With two homes, hot rows, and samples that rank 0 reads for all."""
    settings = ("--set", "prune.budget=60KiB", "--set", "cluster.hot_rows=20", "--data-from", "rank0")
    done = run_verify(
        logs, "--work", str(tmp_path), "--stores", "2", "--steps", "6", *settings,
        "--set", f"row_dtype={row_dtype}", timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}  ")]
        assert "equal to the bit" in line
    assert "all reduce" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def pruned_alone(log_folder):
    prune = {"ratio": "50%", "chunks": 2, "period": 2, "two_dimensions": False}
    given = {"batch_size": 500, "precision": "float64", "model": {"embedding_dim": 4}, "max_steps": 3}
    config, schema = TrainConfig.from_dict({**given, "prune": prune}), find_schema(log_folder)
    layout = layout_of(only_collection(make_model(config, schema)))
    return layout, train_alone(config, schema, log_folder, [np.arange(500, dtype=np.int32) % 2] * 3)


def changed(trained, table, **parts):
    """A training of which some arrays of one table's rows are different."""
    return replace(trained, rows={**trained.rows, table: {**trained.rows[table], **parts}})


def test_a_chunk_too_many_and_a_number_off_are_found(pruned_alone):
    layout, trained = pruned_alone
    table = layout.rows[0].name
    rows = trained.rows[table]
    assert compare(layout, trained, trained).is_equal
    row, place = np.argwhere(rows["present"])[5]
    present, chunks = rows["present"].copy(), rows["chunks"].copy()
    present[row, place] = False
    fewer = np.delete(chunks, 5, axis=0)
    comparison = compare(layout, changed(trained, table, present=present, chunks=fewer), trained)
    kinds = comparison.kinds
    there = kinds["stored chunks"]
    assert (there.largest, there.num_different) == (1, 1)
    assert there.where == f"key {rows['keys'][row]} of table {table}"
    assert not comparison.is_equal
    chunks[5, 1] += 1e-6
    kinds = compare(layout, changed(trained, table, chunks=chunks), trained).kinds
    assert kinds["rows"].largest == pytest.approx(1e-6)
    assert kinds["stored chunks"].is_none
    other = changed(trained, table, columns=rows["columns"][::-1].copy())
    found = compare(layout, other, trained)
    assert (found.is_equal, found.kinds["columns kept"].where) == (False, f"table {table}")


def test_rows_read_ahead_are_no_difference_unless_they_were_trained(pruned_alone):
    layout, trained = pruned_alone
    table = layout.rows[0].name
    rows, format = trained.rows[table], format_of(layout)
    keep = np.ones(len(rows["keys"]), np.bool_)
    keep[np.flatnonzero(rows["present"].any(axis=1))[0]] = False
    lost = changed(trained, table, **format.select(rows, keep))
    assert compare(layout, lost, trained).only_expected == 1
    comparison = compare(layout, trained, lost)  # it was trained
    assert (comparison.only_found, comparison.is_equal) == (1, False)
    fresh = RowMemory(layout)
    first = [
        fresh.groups[number].arena.read(fresh.groups[number].make_fresh(np.array([at]), np.array([2**60])))[0]
        for number, at in (fresh.place_of(chunk) for chunk in range(2))
    ]
    added = {
        **rows,
        "keys": np.array([2**60]),
        "present": np.array([[True, True]]),
        "chunks": np.stack(first),
        "utilities": np.zeros((1, 2), np.float32),
        "touched": np.zeros(1, np.int32),
    }
    assert compare(layout, changed(trained, table, **format.join([rows, added])), trained).is_equal
    added["chunks"][0, 0] += 1
    assert not compare(layout, changed(trained, table, **format.join([rows, added])), trained).is_equal


@pytest.fixture(scope="module")
def alone(log_folder):
    """What one process trains, and of which tables."""
    config = TrainConfig.from_dict(
        {"batch_size": 500, "precision": "float64", "model": {"embedding_dim": 4}, "max_steps": 3}
    )
    schema = find_schema(log_folder)
    layout = layout_of(only_collection(make_model(config, schema)))
    return layout, train_alone(config, schema, log_folder)


def corrupted(trained, table, part, row, column, change):
    """A training of which one number of one table is different."""
    array = trained.rows[table][part].copy()
    array[row, column] = change(array[row, column])
    return changed(trained, table, **{part: array})


@pytest.mark.parametrize(("part", "kind"), [("values", "rows"), ("state", "optimizer state")])
def test_one_corrupted_number_is_found_and_named(alone, part, kind):
    layout, trained = alone
    table = layout.specs[1].name
    found = corrupted(trained, table, part, 7, 0, lambda value: value + 1e-6)
    comparison = compare(layout, found, trained)
    assert not comparison.is_equal
    assert list(comparison.beyond("float64")) == [kind]
    difference = comparison.kinds[kind]
    assert difference.largest == pytest.approx(1e-6)
    assert difference.where == f"key {trained.rows[table]['keys'][7]} of table {table}"
    assert (comparison.only_found, comparison.only_expected) == (0, 0)


def test_a_lost_row_is_found_on_either_side(alone):
    layout, trained = alone
    table = layout.specs[0].name
    rows = trained.rows[table]
    lossy = changed(trained, table, **{name: array[1:] for name, array in rows.items()})
    here, there = compare(layout, lossy, trained), compare(layout, trained, lossy)
    assert (here.only_found, here.only_expected) == (0, 1)
    assert (there.only_found, there.only_expected) == (1, 0)
    assert here.kinds["rows"].where == f"key {rows['keys'][0]} of table {table}"
    assert "rows" in here.beyond("float64")
    assert here.kinds["rows"].largest == there.kinds["rows"].largest


def test_a_row_that_was_never_trained_is_no_difference(alone):
    layout, trained = alone
    spec, format = layout.specs[0], format_of(layout)
    group = next(one for one in layout.groups() if spec in one.tables)  # where rows are made as everywhere
    location = group.make_fresh(np.array([group.tables.index(spec)]), np.array([2**60]))
    added = format.encode(np.array([2**60]), group.arena.read(location), spec.dim)
    more = changed(trained, spec.name, **format.join([trained.rows[spec.name], added]))
    assert compare(layout, more, trained).is_equal
    assert compare(layout, trained, more).is_equal


def test_what_is_no_number_is_far_from_all_else(alone):
    layout, trained = alone
    spoiled = corrupted(trained, layout.specs[0].name, "values", 0, 0, lambda value: np.nan)
    assert compare(layout, spoiled, trained).kinds["rows"].largest == np.inf
    assert compare(layout, spoiled, spoiled).is_equal


def test_missing_steps_and_dense_weights_are_differences(alone):
    layout, trained = alone
    shorter = replace(trained, losses=trained.losses[:-1])
    assert compare(layout, shorter, trained).kinds["losses"].where == "step 3"
    name, weights = next(iter(trained.dense.items()))
    other = replace(trained, dense={**trained.dense, name: weights + 1e-8})
    comparison = compare(layout, other, trained)
    assert list(comparison.beyond("float64")) == ["dense weights"]
    assert name in comparison.kinds["dense weights"].where


def reported(alone, capsys, found, *, sync="on-demand", precision="float64", dense_wire="float32"):
    """Whether a training passes, and what the command says; one process has trained the replay, too."""
    layout, trained = alone
    cluster = {"sync": sync, "dense_wire": dense_wire}
    config = TrainConfig.from_dict({"max_steps": 3, "precision": precision, "cluster": cluster})
    recorded = Recorded(found, [], {"miss_pull": 1234, "evict_push": 0}, 1, 4, 2, 1, "joint", sync)
    comparison = compare(layout, found, trained)
    passes = print_report(config, recorded, comparison, None if config.cluster.inexact else comparison)
    return passes, capsys.readouterr().out


def test_json_says_the_same_as_the_table(alone, capsys):
    layout, trained = alone
    config = TrainConfig.from_dict({"max_steps": 3, "precision": "float64"})
    recorded = Recorded(trained, [], {"miss_pull": 1234, "evict_push": 0}, 1, 4, 2, 1, "joint", "on-demand")
    far = compare(layout, corrupted(trained, "item", "values", 7, 0, lambda value: value + 1e-6), trained)
    assert not print_report(config, recorded, far, far, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["steps"], found["workers"], found["lookups"]) == (False, 3, 2, 4)
    assert found["verdict"].startswith("NOT exact")
    assert found["from_one_process"]["rows"]["largest"] == pytest.approx(1e-6)
    assert found["from_the_replay"] == found["from_one_process"]
    same = compare(layout, trained, trained)
    assert print_devices(replace(config, device="cuda"), trained, same, same, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["device"]) == (True, "cuda")
    assert found["from_a_second_run"]["rows"]["largest"] == 0


def test_the_verdict_names_the_row_that_differs(alone, capsys):
    _, trained = alone
    assert reported(alone, capsys, trained)[0]

    found = corrupted(trained, "item", "values", 7, 0, lambda value: value + 1e-6)
    for precision in ("float64", "float32"):
        passes, out = reported(alone, capsys, found, precision=precision)
        assert not passes
        assert "NOT exact" in out
        assert f"key {trained.rows['item']['keys'][7]} of table item" in out
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
    passes, out = reported(alone, capsys, other, dense_wire="bfloat16")
    assert passes
    assert "with dense_wire bfloat16 dense gradients are rounded on their way" in out
    assert "losses by up to 5.0e-01" in out


def test_a_difference_ends_with_exit_code_1(rowhaul, log_folder, monkeypatch):
    tasks = []

    def differ(task):
        tasks.append(task)
        return False

    monkeypatch.setattr("rowhaul.cli.verify.command._Task.launch_and_compare", differ)
    code, _, err = rowhaul("verify", "--data", log_folder)
    assert (code, err) == (1, "")
    (config,) = [task.config for task in tasks]
    assert (config.precision, config.cluster.workers, config.max_steps) == ("float64", 2, 50)


def test_it_takes_the_flags_of_train(rowhaul, log_folder, monkeypatch):
    tasks = []
    monkeypatch.setattr(
        "rowhaul.cli.verify.command._Task.launch_and_compare", lambda task: tasks.append(task) or True
    )
    flags = ("--model", "deepfm", "--embedding-dim", "4", "--row-optimizer", "adam", "--row-lr", "0.01")
    flags += (
        "--topology",
        "colocated",
        "--peer-to-peer",
        "--shares",
        "2,1",
        "--hot",
        "7",
        "--max-steps",
        "9",
    )
    code, _, err = rowhaul("verify", "--data", log_folder, "--precision", "float32", *flags)
    assert (code, err) == (0, "")
    (config,) = [task.config for task in tasks]
    assert (config.model.name, config.model.embedding_dim) == ("deepfm", 4)
    assert (config.rows.name, config.rows.lr) == ("adam", 0.01)
    cluster = config.cluster
    assert cluster.colocated
    assert cluster.peer_to_peer
    assert (cluster.shares, cluster.hot_rows) == ("2,1", 7)
    assert (config.max_steps, config.precision) == (9, "float32")


@pytest.mark.parametrize("command", ["verify", "size"])
def test_every_flag_of_train_is_known(command, rowhaul, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)
    _, train, _ = rowhaul("train", "--help")
    code, other, _ = rowhaul(command, "--help")
    assert code == 0
    own = {"--out", "--eval-data", "--resume"}
    own |= {"--metrics-port", "--metrics-address", "--stalled-after", "--log-json", "--log-folder"}
    own |= {"--explain"}
    assert set(re.findall(r"--[\w-]+", train)) - own <= set(re.findall(r"--[\w-]+", other))


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


def test_the_verdict_of_a_card_names_what_differs_from_the_cpu_or_from_run_to_run(alone, capsys):
    layout, trained = alone
    config = TrainConfig.from_dict({"max_steps": 3, "precision": "float64", "device": "cuda"})
    same = compare(layout, trained, trained)
    assert print_devices(config, trained, same, same)
    out = capsys.readouterr().out
    assert "one process on cuda, 3 steps in float64" in out
    assert "exact: the card trained the same model as the CPU, to 0.0e+00" in out
    near = compare(layout, corrupted(trained, "item", "values", 7, 0, lambda value: value + 1e-12), trained)
    assert print_devices(config, trained, near, same)
    assert not print_devices(config, trained, same, near)
    assert "1.0e-12 between two runs on the card, at key" in capsys.readouterr().out
    far = compare(layout, corrupted(trained, "item", "values", 7, 0, lambda value: value + 1e-6), trained)
    assert not print_devices(config, trained, far, same)
    assert "1.0e-06 from the CPU, at key" in capsys.readouterr().out
