"""What runs take at their peak, while they save beside training, against what `rowhaul size` has said."""

import json
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
    "rows at home": ["--workers", "2", "--colocated"],
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


# Linux counts what a process took before it became another program: a small one starts the run.
STARTER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=sys.stderr)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""


def rowhaul(*arguments, before=()):
    command = [*before, sys.executable, "-m", "rowhaul", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def peak_bytes(*arguments):
    """Of the largest process of a run."""
    return int(rowhaul(*arguments, before=[sys.executable, "-c", STARTER]))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_run_that_saves_takes_what_was_said(cluster, log, tmp_path):
    given = ["--data", log / "part-0.parquet", "--schema", log / "schema.yaml", *RUN, *CLUSTERS[cluster]]
    expected = max(rank["total"] for rank in json.loads(rowhaul("size", *given, "--json"))["ranks"])
    rowhaul("train", *given, "--out", tmp_path / "kernels", "--max-steps", "2", "--checkpoint-every", "1")
    found = peak_bytes("train", *given, "--out", tmp_path / "run", "--checkpoint-every", "8")
    print(f"{cluster}: {found / 2**20:.0f} MiB, said {expected / 2**20:.0f} MiB")
    assert found == pytest.approx(expected, rel=0.1)
