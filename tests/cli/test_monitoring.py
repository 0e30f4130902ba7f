"""`rowhaul train` under watch: one process that is scraped, options that are refused, logs that are kept."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from scraping import health, scrape, wait_for

from rowhaul.train import TrainConfig

SMALL = ("--batch-size", "50", "--embedding-dim", "4", "--set", "model.options.top=[16]")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_is_scraped_while_it_trains(log_folder, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", run, *SMALL]
    options = ["--epochs", "1000", "--metrics-port", "0", "--log-json", "--set", "log_every=1"]
    process = subprocess.Popen(list(map(str, [*command, *options])), stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in iter(process.stdout.readline, "") if "metrics: " in line)
        port = int(line.rpartition(":")[2].partition("/")[0])
        assert health(port)[0] == 200
        shown = wait_for(lambda: (one := scrape(port))["rowhaul_step"] > 20 and one)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    logged = {line["step"]: line for line in lines_of(run / "metrics.jsonl") if line["kind"] == "train"}
    # The training thread goes on while it is read: each number is of the step shown or of the next ones.
    near = range(int(shown["rowhaul_step"]), int(shown["rowhaul_step"]) + 50)
    assert shown["rowhaul_loss"] in [logged[step]["loss"] for step in near if step in logged]
    assert shown["rowhaul_samples_total"] in [logged[step]["samples"] for step in near if step in logged]
    events = lines_of(run / "logs" / "rank-0000.jsonl")
    assert (events[0]["event"], events[-1]["event"], events[-1]["message"]) == ("start", "end", "interrupted")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_port_in_use_is_refused_before_anything_is_written(rowhaul, log_folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for cluster in ((), ("--workers", "2", "--stores", "1")):
            code, _, err = rowhaul(
                *("train", "--data", log_folder, "--out", tmp_path / "run", "--log-json"),
                *("--metrics-port", port, *cluster, *SMALL),
            )
            assert code == 2
            assert err.strip() == (
                f"error: metrics port {port} of 127.0.0.1 is in use; give --metrics-port another one, or 0 "
                "for a free one"
            )
            assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log-json"], "--log-json without --out needs a folder on this machine: give --log-folder"),
        (["--log-folder", "x"], "--log-folder does nothing without --log-json"),
        (["--metrics-address", "0.0.0.0"], "--metrics-address does nothing without --metrics-port"),
        (["--metrics-port", "70000"], "must be a port from 1 to 65535"),
        (["--metrics-port", "0", "--stalled-after", "0"], "more than 0 seconds"),
        (["--metrics-port", "0", "--metrics-address", "203.0.113.7"], "is no address of this machine"),
    ],
)
def test_wrong_options_are_one_line(options, message, rowhaul, log_folder):
    code, _, err = rowhaul("train", "--data", log_folder, *SMALL, *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_logs_are_kept_when_a_run_fails_to_start_and_when_it_is_resumed(rowhaul, log_folder, tmp_path):
    run = tmp_path / "run"
    train = ("train", "--out", run, "--log-json", *SMALL)
    assert rowhaul(*train, "--data", log_folder, "--model", "nope")[0] == 2
    assert [line["event"] for line in lines_of(run / "logs" / "rank-0000.jsonl")] == ["failed"]
    assert rowhaul(*train, "--data", log_folder, "--max-steps", "2")[0] == 0  # in the same folder
    resumed = ("train", "--out", run, "--resume", "--data", log_folder, "--max-steps", "3")
    assert rowhaul(*resumed)[0] == 0
    events = [line["event"] for line in lines_of(run / "logs" / "rank-0000.jsonl")]
    assert events.count("start") == events.count("end") == 2
    assert TrainConfig.read(run / "config.yaml").monitoring.log_json


def test_a_folder_for_logs_may_be_elsewhere(rowhaul, log_folder, tmp_path):
    code, *_ = rowhaul(
        *("train", "--data", log_folder, "--max-steps", "1", "--log-json"),
        *("--log-folder", tmp_path / "logs", *SMALL),
    )
    assert code == 0
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["rank-0000.jsonl"]
