"""Runs whose checkpoints are at a URL: no folder but the log's, and any machine can go on."""

from dataclasses import replace

import fsspec
import pytest
from test_damaged_checkpoints import Notes
from test_run import CONFIG, stop_after
from test_trainer import state_bytes

from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.export.export import export
from rowhaul.train import load_trained, train_run
from rowhaul.train.run_folder import open_saved, settings_to_resume

URL = "memory://bucket/run"
AT_URL = replace(CONFIG, checkpoints=URL)


@pytest.fixture(autouse=True)
def _empty():
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.mark.slow
def test_a_run_goes_on_from_the_url_alone(tmp_path, log_schema, log_folder):
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a")
    train_run(AT_URL, log_schema, log_folder, out=tmp_path / "b", should_stop=stop_after(11))
    assert not (tmp_path / "b" / "checkpoints").exists()
    settings, schema = settings_to_resume(tmp_path / "c", URL)
    assert (settings.to_dict(), schema) == (AT_URL.to_dict(), log_schema)
    notes = Notes()
    train_run(AT_URL, log_schema, log_folder, out=tmp_path / "c", resume=True, listener=notes)
    assert notes.texts == [f"resuming from {URL}/step-000000011"]
    for run in (URL, f"{URL}/step-000000048", tmp_path / "c", tmp_path / "b"):
        assert state_bytes(load_trained(run)) == state_bytes(load_trained(tmp_path / "a"))
    assert [one.name for one in finished_checkpoints(URL)] == ["step-000000042", "step-000000048"]


def test_no_folder_is_needed(log_schema, log_folder):
    train_run(AT_URL, log_schema, log_folder, should_stop=stop_after(3))
    assert train_run(AT_URL, log_schema, log_folder, resume=True, should_stop=stop_after(1)).step == 4
    assert open_saved(URL).facts["step"] == 4


def test_what_does_not_fit_is_refused(tmp_path, log_schema, log_folder):
    with pytest.raises(ConfigError, match=r"memory://bucket/run holds no run to resume"):
        train_run(AT_URL, log_schema, log_folder, resume=True)
    train_run(AT_URL, log_schema, log_folder, out=tmp_path / "a", should_stop=stop_after(3))
    with pytest.raises(ConfigError, match="has checkpoints already; resume from them"):
        train_run(AT_URL, log_schema, log_folder, out=tmp_path / "b")
    with pytest.raises(ConfigError, match="was trained with seed = 0, now it is 3"):
        train_run(replace(AT_URL, seed=3), log_schema, log_folder, out=tmp_path / "b", resume=True)
    with pytest.raises(ConfigError, match=r"--out s3://b/run: .*--checkpoints the URL"):
        train_run(CONFIG, log_schema, log_folder, out="s3://b/run")
    assert not (tmp_path / "b").exists()


def test_an_export_of_a_url_serves(tmp_path, log_schema, log_folder):
    train_run(AT_URL, log_schema, log_folder, out=tmp_path / "a", should_stop=stop_after(9))
    made = export(open_saved(URL), tmp_path / "x")
    stream = SampleStream(log_folder / "test", log_schema, 8192)
    assert load_trained(made.path).evaluate(stream) == load_trained(URL).evaluate(stream)
