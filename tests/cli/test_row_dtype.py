"""`--row-dtype` and `rowhaul ckpt convert` on the command line."""

import json
import subprocess
import sys

import pytest

from rowhaul.checkpoint import CheckpointReader
from rowhaul.train import TrainConfig

SMALL = ("--embedding-dim", "8", "--max-steps", "4", "--batch-size", "200")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, log_folder):
    out = tmp_path_factory.mktemp("packed") / "run"
    command = ["train", "--data", f"{log_folder}/*.parquet", "--row-dtype", "int8", *SMALL, "--out", str(out)]
    subprocess.run([sys.executable, "-m", "rowhaul", *command], check=True, capture_output=True, timeout=300)
    return out


@pytest.mark.slow
def test_a_run_is_listed_converted_and_goes_on(rowhaul, run_folder, log_folder, tmp_path):
    code, out, _ = rowhaul("ckpt", "ls", run_folder)
    assert code == 0
    assert "values in int8" in out
    code, out, err = rowhaul(
        "ckpt", "convert", run_folder, "--row-dtype", "bfloat16", "--out", tmp_path / "b"
    )
    assert code == 0, err
    assert "now in bfloat16" in out
    assert TrainConfig.read(tmp_path / "b" / "config.yaml").row_dtype == "bfloat16"
    reader = CheckpointReader(tmp_path / "b" / "checkpoints" / "step-000000004")
    assert {one.format for one in reader.tables.values()} == {"bfloat16"}
    assert rowhaul("evaluate", tmp_path / "b", "--data", f"{log_folder}/*.parquet")[0] == 0
    data = ("--data", f"{log_folder}/*.parquet")
    code, _, err = rowhaul("train", *data, "--resume", "--out", run_folder, "--row-dtype", "float32")
    assert code != 0
    assert "rowhaul ckpt convert" in " ".join(err.split())
    code, out, err = rowhaul("train", *data, "--resume", "--out", tmp_path / "b", "--max-steps", "6")
    assert code == 0, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--row-dtype", "int4"), "one of float32, bfloat16, float16, int8"),
        (("--row-dtype", "int8", "--precision", "float64"), "use precision float32"),
        (("--row-dtype", "int8", "--prune", "90%"), "leave out prune"),
        (("--row-dtype", "int8", "--embedding-dim", "1"), "a row has a single value"),
    ],
)
def test_refusals_say_what_to_change(rowhaul, log_folder, tmp_path, arguments, message):
    code, _, err = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", *arguments, "--out", tmp_path / "run"
    )
    assert code != 0
    assert message in " ".join(err.split())


@pytest.mark.slow
def test_sizes_and_simulated_bytes_shrink(rowhaul, simulate, log_folder, tmp_path):
    sizes, moved = {}, {}
    for row_dtype in ("float32", "bfloat16", "int8"):
        _, out, _ = rowhaul("size", "--data", log_folder, "--row-dtype", row_dtype, "--json")
        sizes[row_dtype] = sum(table["values"] for table in json.loads(out)["tables"])
        file = tmp_path / f"{row_dtype}.json"
        code, _, err = simulate(
            "--dim", "16", "--dispatch", "random", "--row-dtype", row_dtype, "--json", str(file)
        )
        assert code == 0, err
        (outcome,) = (one for one in json.loads(file.read_text())["mechanisms"] if one["name"] == "random")
        moved[row_dtype] = sum(map(sum, outcome["bytes"].values()))
    assert sizes["bfloat16"] * 2 == sizes["float32"]
    assert sizes["int8"] < sizes["bfloat16"]
    assert moved["bfloat16"] * 2 == moved["float32"]  # sgd has no state
    assert moved["int8"] * 64 == moved["float32"] * 20


@pytest.mark.slow
@pytest.mark.parametrize("row_dtype", ["bfloat16", "int8"])
def test_verify_replays_to_the_bit(log_folder, row_dtype):
    command = [
        "verify",
        "--data",
        f"{log_folder}/*.parquet",
        "--row-dtype",
        row_dtype,
        *SMALL,
        "--workers",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rowhaul", *command], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to the bit to the replay" in " ".join(done.stdout.split())
