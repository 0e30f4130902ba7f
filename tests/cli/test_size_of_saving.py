"""What runs take at their peak, while they save beside training, against what `rowhaul size` has said."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

NUM_SAMPLES = 120_000
RUN = [
    *("--set", "model.embedding_dim=96", "--set", "rows.name=adam", "--set", "rows.lr=0.01"),
    *("--set", "model.options.top=[16]", "--set", "model.options.bottom=[8]", "--batch-size", "6000"),
]
CLUSTERS = {
    "one process": [],
    "two workers and a store": ["--workers", "2", "--stores", "1", "--cache", "30000"],
    "two co-located workers": ["--workers", "2", "--colocated", "--cache", "40000"],
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Every user is new: rows are most of what a run takes."""
    folder = tmp_path_factory.mktemp("saved")
    random = np.random.default_rng(0)
    columns = {
        "y": random.integers(0, 2, NUM_SAMPLES).astype(np.int8),
        "user": np.arange(NUM_SAMPLES) * 977,
        "item": random.integers(0, 8000, NUM_SAMPLES),
    }
    pq.write_table(pa.table(columns), folder / "part-0.parquet", row_group_size=20_000)
    (folder / "schema.yaml").write_text("label: y\nids: [user, item]\n")
    return folder


def rowhaul(*arguments, **more):
    command = [sys.executable, "-m", "rowhaul", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def peak_bytes(process):
    """Of the largest process of a run, once it has ended."""
    output = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, output
    return used.ru_maxrss * 1024


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_run_that_saves_takes_what_was_said(cluster, log, tmp_path):
    given = ["--data", log / "part-0.parquet", "--schema", log / "schema.yaml", *RUN, *CLUSTERS[cluster]]
    said, trouble = rowhaul("size", *given, "--json").communicate(timeout=600)
    assert said, trouble
    expected = max(rank["total"] for rank in json.loads(said)["ranks"])
    peak_bytes(rowhaul("train", *given, "--out", tmp_path / "kernels", "--checkpoint-every", "2"))
    found = peak_bytes(rowhaul("train", *given, "--out", tmp_path / "run", "--checkpoint-every", "8"))
    print(f"{cluster}: {found / 2**20:.0f} MiB, said {expected / 2**20:.0f} MiB")
    assert found == pytest.approx(expected, rel=0.1)
