"""Several labels on a cluster: what one process learns."""

import subprocess
import sys

import pytest

SMALL = ("--embedding-dim", "4", "--batch-size", "256", "--workers", "2", "--steps", "4")
CASES = {
    "mmoe": ("--set", "loss.divide_by=labels"),
    "ple": ("--set", "loss.weights.conversion=0.3", "--colocated"),
    "esmm": ("--data-from", "rank0"),
}


def rowhaul(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rowhaul", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_ranks_learn_several_labels_as_one_process_does(model, tmp_path):
    made = rowhaul(
        "generate", "--preset", "movielens", "--rows", "1500", "--conversions", "--out", f"{tmp_path}/log"
    )
    assert made.returncode == 0, made.stderr
    done = rowhaul("verify", "--data", f"{tmp_path}/log/*.parquet", "--model", model, *SMALL, *CASES[model])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to the bit") == 4
