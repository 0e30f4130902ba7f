"""A run publishes a base and deltas; together they are the export of its last step, to the bit."""

import json

import pytest
from published_rows import SMALL, exported, rows_of, weights_of

from rowhaul.errors import ConfigError
from rowhaul.serve import Scorer
from rowhaul.train import TrainConfig, train_run


def config_of(tmp_path, **given):
    publish = {"to": str(tmp_path / "served"), "every": 2, "compact_after": 3, **given.pop("publish", {})}
    return TrainConfig.from_dict({"batch_size": 200, "model": SMALL, "publish": publish, **given})


@pytest.mark.parametrize(
    "settings",
    [
        {"tables": {"default": {"ttl": 3}}, "row_dtype": "int8"},
        pytest.param({"publish": {"dense": "onnx,pt2"}}, marks=pytest.mark.slow),
    ],
)
def test_base_and_deltas_are_the_export(tmp_path, log_folder, log_schema, settings):
    """Whole rows; and rows in few bits, of which some expire: deltas delete these."""
    train_run(config_of(tmp_path, **settings), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run")
    served = tmp_path / "served"
    about = json.loads((served / "served.json").read_text())["published"]
    scorer = Scorer(served)
    assert scorer.model.version == about["deltas"][-1]["to"] if about["deltas"] else about["version"]
    expected = exported(tmp_path / "run", tmp_path / "exported")
    assert scorer.step == expected.step > 0
    assert rows_of(scorer) == rows_of(expected)
    newest = served / about["deltas"][-1]["folder"] if about["deltas"] else scorer.folder.rows.path.parent
    exported_in = expected.folder.rows.path.parent
    assert weights_of(newest / "dense.onnx") == weights_of(exported_in / "dense.onnx")
    assert (newest / "dots.safetensors").read_bytes() == (exported_in / "dots.safetensors").read_bytes()
    assert scorer.dense.kind == "dots"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": {"ratio": "50%", "tail": "zeros"}}, "chunks and shared rows"),
        ({"publish": {"to": "s3://bucket/served"}}, "a folder of their machine"),
        ({"publish": {"to": "served", "every": "soon"}}, "publish.every"),
        ({"publish": {"to": "served", "dense": "tf"}}, "publish.dense"),
        ({"device": "cuda"}, "device cuda"),
    ],
)
def test_what_cannot_be_published_is_refused(tmp_path, log_folder, log_schema, settings, message):
    with pytest.raises(ConfigError, match=message):
        train_run(
            config_of(tmp_path, **settings), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run"
        )
    assert not (tmp_path / "served").exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_refused_before_the_run_begins(
    tmp_path, log_folder, log_schema, served_run
):
    (tmp_path / "served").symlink_to(served_run[1])
    with pytest.raises(ConfigError, match="was exported; choose another folder"):
        train_run(config_of(tmp_path), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()
