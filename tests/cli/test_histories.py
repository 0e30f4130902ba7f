"""Models of histories from a raw log to predictions, alone and on a cluster, by the command line."""

import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

SMALL = ("--batch-size", "250", "--set", "model.embedding_dim=8")
NEXT = {
    "label": "liked",
    "ids": [
        {"name": "movie", "type": "integer"},
        {"name": "history", "type": "integer", "table": "movie", "max_length": 10},
        {"name": "others", "type": "integer", "table": "movie", "negatives_of": "movie", "count": 2},
    ],
}


def run(*arguments, ok=True, timeout=200):
    command = [sys.executable, "-m", "rowhaul", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """MovieLens-like ratings, whose users have a taste that their history shows."""
    folder = tmp_path_factory.mktemp("histories")
    run("generate", "--preset", "movielens", "--rows", "4000", "--raw", "--out", folder / "raw")
    run("prepare", "--format", "movielens", folder / "raw", "--history", "20", "--out", folder / "data")
    (folder / "next.yaml").write_text(yaml.safe_dump(NEXT))
    return folder


def model_options(name, data):
    schema = ("--schema", data / "next.yaml") if name == "sasrec" else ()
    return ("--model", name, *schema, *SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_a_cluster_trains_what_one_process_does(name, data):
    """Equal to the bit in a replay, and within 1e-9 of whole batches."""
    options = ("--workers", "2", "--colocated", "--cache", "3000", "--steps", "8")
    told = run("verify", "--data", data / "data", *model_options(name, data), *options)
    for kind in ("rows", "optimizer state", "dense weights", "losses"):
        (line,) = [line for line in told.splitlines() if line.startswith(f"{kind}  ")]
        assert line.rstrip().endswith("equal to the bit")
        assert float(line.removeprefix(kind).split()[0]) < 1e-9
    assert re.search(r"^exact: ", told, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "sasrec"])
def test_train_resume_evaluate_and_predict(name, data, tmp_path):
    options, out = model_options(name, data), tmp_path / "run"
    told = run(
        "train", "--data", data / "data", "--eval-data", data / "data/test", *options, "--out", out,
        "--max-steps", "6", "--set", "checkpoint_every=3",
    )  # fmt: skip
    if name == "sasrec":
        assert told.count("cut to the newest") == 1
    run("train", "--resume", "--out", out, "--max-steps", "10")
    assert "AUC" in run("evaluate", out, "--data", data / "data/test")
    run("predict", out, "--data", data / "data/test", "--out", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    assert len(scores) == 400
    assert all(np.isfinite(scores[one].to_numpy()).all() for one in scores.column_names)
    run("export", out, "--out", tmp_path / "plain")
    refused = run("export", out, "--out", tmp_path / "served", "--dense", "pt2", ok=False)
    assert "reads rows one by one" in refused.replace("\n", " ")
