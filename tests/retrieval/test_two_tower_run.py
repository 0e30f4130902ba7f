"""A two-tower run from a log to an index: what is exported, measured and refused."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

SCHEMA = {
    "label": "liked",
    "ids": [
        {"name": "user", "type": "integer"},
        {"name": "movie", "type": "integer"},
        {"name": "others", "type": "integer", "table": "movie", "negatives_of": "movie", "count": 2},
    ],
}


def run(*arguments, ok=True):
    command = [sys.executable, "-m", "rowhaul", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout if ok else " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    (folder / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    run("generate", "--preset", "movielens", "--rows", "6000", "--out", folder / "data")
    run(
        "train", "--data", folder / "data/*.parquet", "--schema", folder / "schema.yaml",
        "--model", "two_tower", "--batch-size", "250", "--set", "model.embedding_dim=8",
        "--out", folder / "run",
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_index_finds_what_predict_scores_best(folder):
    test = sorted((folder / "data/test").glob("*.parquet"))
    told = json.loads(
        run("index", folder / "run", "--out", folder / "items", "--kind", "hnsw", "--data", *test, "--json")
    )
    assert told["recall"] > 0.95
    assert 0 < told["hit_rate"] <= 1
    items = pq.read_table(folder / "items/items.parquet")
    # One user beside every item, scored by the model itself.
    user = pq.read_table(test[0])["user"][0].as_py()
    pairs = items.select(["key"]).rename_columns(["movie"])
    pq.write_table(pairs.append_column("user", [[user] * len(items)]), folder / "pairs.parquet")
    run("predict", folder / "run", "--data", folder / "pairs.parquet", "--out", folder / "scores.parquet")
    scores = pq.read_table(folder / "scores.parquet")["score"].to_numpy()

    from rowhaul.retrieval import ItemIndex, user_vectors
    from rowhaul.train import load_trained

    index = ItemIndex.read(folder / "items")
    _, vectors = next(iter(user_vectors(load_trained(str(folder / "run")), str(folder / "pairs.parquet"))))
    products = index.vectors @ vectors[0]
    assert np.corrcoef(np.argsort(np.argsort(products)), np.argsort(np.argsort(scores)))[0, 1] > 0.999999
    run("index", folder / "run", "--items", folder / "pairs.parquet", "--out", folder / "listed")
    assert np.array_equal(ItemIndex.read(folder / "listed").vectors, index.vectors)
    assert "exists; choose another" in run("index", folder / "run", "--out", folder / "items", ok=False)


@pytest.mark.slow
def test_a_cluster_trains_what_one_process_does(folder):
    told = run(
        "verify", "--data", folder / "data/*.parquet", "--schema", folder / "schema.yaml",
        "--model", "two_tower",
        "--batch-size", "250", "--workers", "2", "--colocated", "--cache", "3000", "--steps", "6",
        "--set", "model.embedding_dim=8",
    )  # fmt: skip
    assert told.count("equal to the bit") >= 4
    assert "\nexact: " in told


def test_items_of_rows_within_a_budget_must_be_listed(tmp_path):
    data = tmp_path / "data"
    run("generate", "--preset", "movielens", "--rows", "2000", "--out", data)
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    run(
        "train", "--data", data / "*.parquet", "--schema", tmp_path / "schema.yaml", "--model", "two_tower",
        "--batch-size", "250", "--set", "model.embedding_dim=8", "--memory-budget", "100KiB",
        "--out", tmp_path / "run",
    )  # fmt: skip
    said = run("index", tmp_path / "run", "--out", tmp_path / "items", ok=False)
    assert "do not say which items they are of: list the items (--items FILES)" in said
    log = tmp_path / "users.csv"
    log.write_text("user,movie\n1,2\n")
    listed = ("--items", data / "*.parquet", "--data", log)
    said = run("index", tmp_path / "run", "--out", tmp_path / "items", *listed, ok=False)
    assert "users.csv: a raw log, not a Parquet file" in said
    assert "Traceback" not in said
    assert not (tmp_path / "items").exists()
