"""Running commands, and a finished run to try them on."""

import subprocess
import sys

import pytest

from rowhaul.cli import main


@pytest.fixture
def rowhaul(capsys, monkeypatch):
    """Run a command in this process; returns its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rowhaul", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


SIMULATED = (
    *("--workers", "4", "--batch-per-worker", "50", "--links", "5gbit*2,0.5gbit*2"),
    *("--cache", "60%", "--iterations", "12"),
)


@pytest.fixture
def simulate(rowhaul, log_folder):
    """Run the command on the click log; returns exit code, output and errors on one line each."""

    def run(*arguments, data=None, small=SIMULATED):
        code, out, err = rowhaul(
            "simulate",
            data or f"{log_folder}/*.parquet",
            *small,
            "--warmup",
            "4",
            *([] if "--compute" in arguments else ["--compute", "0"]),
            *arguments,
        )
        return code, out, " ".join(err.split())

    return run


SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, log_folder):
    """A finished run, for all modules: copy it before you change it."""
    run = tmp_path_factory.mktemp("cli") / "run"
    command = [
        sys.executable,
        "-m",
        "rowhaul",
        "train",
        "--data",
        log_folder / "*.parquet",
        "--out",
        run,
        *SMALL,
        "--eval-data",
        log_folder / "test",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for word in ("AUC", "log loss", "normalised entropy", "samples per second", "rowhaul predict"):
        assert word in done.stdout
    return run
