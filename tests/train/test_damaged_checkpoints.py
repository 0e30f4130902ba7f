"""A run whose newest checkpoint is damaged goes on from the one before, and says so."""

import json
from dataclasses import replace

import pytest
from test_run import CONFIG, stop_after
from test_trainer import state_bytes

from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rowhaul.train import load_trained, train_run
from slow_cases import mostly_slow


class Notes:
    def __init__(self):
        self.texts = []

    def noted(self, text):
        self.texts.append(text)

    def started(self, samples, total_samples):
        pass

    stepped = evaluated = started

    def evaluating(self, total_samples):
        pass


def stopped_run(folder, log_schema, log_folder, **settings):
    config = replace(CONFIG, log_every=1, **settings)
    train_run(config, log_schema, log_folder, out=folder, should_stop=stop_after(16))
    return config


def damage(checkpoint, how):
    name = "manifest.json" if "manifest" in how else "rows-0001-00000.safetensors"
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "flipped byte in the manifest":
        content[content.index(b'"samples": ') + 11] ^= 1  # another number
        path.write_bytes(content)
    elif "flipped" in how:
        content[-3] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    "how",
    mostly_slow(
        ["missing", "flipped byte", "cut", "flipped byte in the manifest", "cut manifest"],
        "flipped byte",
        "cut manifest",
    ),
)
def test_the_one_before_is_taken(how, tmp_path, log_schema, log_folder):
    config = stopped_run(tmp_path / "b", log_schema, log_folder)
    checkpoints = tmp_path / "b" / "checkpoints"
    assert [path.name for path in finished_checkpoints(checkpoints)] == ["step-000000014", "step-000000016"]
    damage(checkpoints / "step-000000016", how)
    with pytest.raises(DamagedCheckpointError, match="step-000000016"):
        load_trained(tmp_path / "b")
    notes = Notes()
    train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True, listener=notes)
    assert notes.texts[0].startswith("step-000000016 is damaged and not used: ")
    assert "manifest.json" in notes.texts[0] or "rows-0001-00000.safetensors" in notes.texts[0]
    assert notes.texts[1].endswith("step-000000014")
    train_run(config, log_schema, log_folder, out=tmp_path / "a")
    assert state_bytes(load_trained(tmp_path / "a")) == state_bytes(load_trained(tmp_path / "b"))
    lines = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 49))
    assert [line["text"] for line in lines if line["kind"] == "note"] == notes.texts
    assert len(list(checkpoints.iterdir())) == config.keep_checkpoints  # and nothing damaged stays


def test_the_step_of_a_damaged_checkpoint_is_saved_again(tmp_path, log_schema, log_folder):
    config = stopped_run(tmp_path / "b", log_schema, log_folder, checkpoint_every=8, keep_checkpoints=9)
    damage(tmp_path / "b" / "checkpoints" / "step-000000016", "flipped byte")
    stop = stop_after(10)
    train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True, should_stop=stop)
    for path in finished_checkpoints(tmp_path / "b" / "checkpoints"):
        load_trained(path)
    assert len(finished_checkpoints(tmp_path / "b" / "checkpoints")) == 3  # 8, 16, 18


def test_without_an_intact_one_nothing_is_trained(tmp_path, log_schema, log_folder):
    config = stopped_run(tmp_path / "b", log_schema, log_folder)
    checkpoints = finished_checkpoints(tmp_path / "b" / "checkpoints")
    damage(checkpoints[0], "cut")
    damage(checkpoints[1], "cut manifest")
    before = sorted(path.name for path in (tmp_path / "b").rglob("*"))
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged:\n.*000016.*\n.*000014"):
        train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True)
    assert sorted(path.name for path in (tmp_path / "b").rglob("*")) == before


def test_a_damaged_checkpoint_stays_where_a_run_is_refused(tmp_path, log_schema, log_folder):
    config = stopped_run(tmp_path / "b", log_schema, log_folder)
    damage(tmp_path / "b" / "checkpoints" / "step-000000016", "cut")
    with pytest.raises(ConfigError, match="seed"):
        train_run(replace(config, seed=5), log_schema, log_folder, out=tmp_path / "b", resume=True)
    assert (tmp_path / "b" / "checkpoints" / "step-000000016" / "manifest.json").is_file()
