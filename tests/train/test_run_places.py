"""Where a run is found, and what it left: from any directory, and after it was moved."""

from dataclasses import replace

import pytest
from test_run import CONFIG, stop_after

from rowhaul.checkpoint import latest_checkpoint
from rowhaul.errors import CheckpointError
from rowhaul.monitoring.settings import MonitoringConfig
from rowhaul.train import ClusterConfig, TrainConfig, load_trained, train_run
from rowhaul.train.run_folder import CONFIG_FILE


def test_paths_of_a_run_lead_there_from_any_directory(tmp_path, log_schema, log_folder, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    places = [("saved", "run", tmp_path), ("~/saved", "~/run", tmp_path / "home")]
    for checkpoints, out, folder in places:
        begun = replace(CONFIG, checkpoints=checkpoints, monitoring=MonitoringConfig(log_folder="logs"))
        begun = replace(begun, cluster=ClusterConfig(secret_file="secret"))
        train_run(begun, log_schema, log_folder, out=out, should_stop=stop_after(2))
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert load_trained(folder / "run").step == 2
        kept = TrainConfig.read(folder / "run" / CONFIG_FILE)
        assert kept.monitoring.log_folder == str(tmp_path / "logs")
        assert kept.cluster.secret_file == str(tmp_path / "secret")
        resumed = train_run(
            kept, log_schema, log_folder, out=folder / "run", resume=True, should_stop=stop_after(2)
        )
        assert resumed.step == 4
        assert latest_checkpoint(folder / "saved").name == "step-000000004"
        monkeypatch.chdir(tmp_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "~").exists()


def test_checkpoints_that_were_moved_are_looked_for_where_the_run_left_them_and_can_be_named(
    tmp_path, log_schema, log_folder
):
    saved, moved = tmp_path / "saved", tmp_path / "moved"
    config = replace(CONFIG, checkpoints=str(saved))
    train_run(config, log_schema, log_folder, out=tmp_path / "run", should_stop=stop_after(2))
    saved.rename(moved)
    with pytest.raises(CheckpointError, match=rf"in {saved}, and no complete one .* if they were moved"):
        load_trained(tmp_path / "run")
    assert load_trained(moved).step == 2
