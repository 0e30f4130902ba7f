"""`--dense-wire bfloat16` says that it is not exact wherever it shows, and is the same in every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rowhaul.errors import ConfigError
from rowhaul.train.cluster_config import ClusterConfig

WHY = "with dense_wire bfloat16 dense gradients are rounded on their way"
SMALL = ("--embedding-dim", "4", "--batch-size", "300", "--workers", "3", "--colocated", "--threads", "1")


def rowhaul_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "rowhaul", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def notes_and_losses(run: Path) -> tuple[list[str], list[float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    return [line["text"] for line in lines if line["kind"] == "note"], losses


@pytest.mark.slow
def test_a_run_says_that_it_is_not_exact(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    rowhaul_command("generate", "--rows", "2_000", "--test-share", "0", "--out", str(logs))
    train = ("train", "--data", str(logs), *SMALL, "--set", "log_every=1")
    losses = {}
    for wire in ("bfloat16", "bfloat16", "float32"):
        out = tmp_path / f"{wire}-{len(losses)}"
        text = rowhaul_command(*train, "--out", str(out), "--dense-wire", wire)
        notes, losses[out.name] = notes_and_losses(out)
        assert (f"not exact, by design: {WHY}" in notes) == (wire == "bfloat16")
        assert (f"not exact {WHY}" in text) == (wire == "bfloat16")
    rounded, again, exact = losses.values()
    assert rounded == again
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_verify_says_what_differs_and_why(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    rowhaul_command("generate", "--rows", "2_000", "--test-share", "0", "--out", str(logs))
    text = rowhaul_command("verify", "--data", str(logs), *SMALL, "--steps", "4", "--dense-wire", "bfloat16")
    assert f"not exact, by design: {WHY}. From one process differ rows by up to" in text
    assert "exact: the ranks" not in text


def test_settings_say_what_is_not_exact() -> None:
    assert ClusterConfig().inexact == ClusterConfig(sync="bounded:0").inexact == ""
    assert ClusterConfig(dense_wire="bfloat16").inexact == WHY
    assert ClusterConfig(sync="bounded:2", dense_wire="bfloat16").inexact.endswith(f"; {WHY}")
    with pytest.raises(ConfigError, match=r"cluster\.dense_wire must be float32 or bfloat16, got 'int8'"):
        ClusterConfig(dense_wire="int8")
