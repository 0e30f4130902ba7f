"""Logs as JSON lines: every record a line, kept over runs, bounded, and nothing left behind in logging."""

import json
import logging
import socket
import warnings

import pytest

from rowhaul.errors import ConfigError
from rowhaul.monitoring import json_log as module
from rowhaul.monitoring.json_log import json_log
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.config import ModelConfig

CONFIG = TrainConfig(model=ModelConfig(embedding_dim=4), batch_size=500, log_every=4)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_logged_with_warnings_and_libraries(tmp_path, log_schema, log_folder, recwarn):
    with json_log(tmp_path, 3, lambda: 7):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path / "r", eval_data=log_folder / "test")
        logging.getLogger("some.package").warning("disk %s", "slow")
        warnings.warn("old setting", UserWarning, stacklevel=1)
    lines = lines_of(tmp_path / "rank-0003.jsonl")
    events = [line["event"] for line in lines]
    expected = ["start", "train", "train", "train", "checkpoint", "evaluation", "end", "message", "warning"]
    assert events == expected
    assert all(
        list(line)[:7] == ["time", "level", "rank", "host", "step", "event", "message"] for line in lines
    )
    assert {(line["rank"], line["host"]) for line in lines} == {(3, socket.gethostname())}
    assert [line["step"] for line in lines[1:6]] == [4, 8, 12, 12, 12]
    written = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines[1:4]] == [one["loss"] for one in written if one["kind"] == "train"]
    assert (lines[7]["logger"], lines[7]["message"], lines[7]["step"]) == ("some.package", "disk slow", 7)
    assert lines[8]["message"].startswith("UserWarning: old setting")
    assert [str(one.message) for one in recwarn] == ["old setting"]  # still shown


def test_an_error_is_logged_with_its_traceback_and_logs_are_appended(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), json_log(tmp_path / "a" / "b", 0, lambda: 5):
            print(1 / 0)
    first, second = lines_of(tmp_path / "a" / "b" / "rank-0000.jsonl")
    assert (first["level"], first["event"], first["step"]) == ("error", "failed", 5)
    assert first["message"] == "the run has failed: division by zero"
    assert "print(1 / 0)" in second["traceback"]


def test_numbers_that_json_does_not_know(tmp_path):
    with json_log(tmp_path, 0, lambda: 0):
        logging.getLogger("rowhaul.x").info("odd", extra={"values": {"loss": float("nan"), "at": tmp_path}})
    text = (tmp_path / "rank-0000.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == "nan"


def test_the_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    with json_log(tmp_path, 0, lambda: 0):
        for number in range(200):
            logging.getLogger("rowhaul").info("line %d", number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["rank-0000.jsonl", *(f"rank-0000.jsonl.{number}" for number in (1, 2, 3))]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    assert lines_of(tmp_path / "rank-0000.jsonl")[-1]["message"] == "line 199"


def test_logging_is_as_before(tmp_path):
    root, package = logging.getLogger(), logging.getLogger("rowhaul")
    before = [*root.handlers], root.level, package.level, warnings.showwarning
    with json_log(tmp_path, 0, lambda: 0):
        assert len(root.handlers) > len(before[0])
    assert ([*root.handlers], root.level, package.level, warnings.showwarning) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another --log-folder"), json_log(tmp_path / "file", 0, int):
        pass
