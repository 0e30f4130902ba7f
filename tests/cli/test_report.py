"""`rowhaul report` and `rowhaul train --explain`: real runs, real processes, files that can and cannot be "
"written."""

import json
import subprocess
import sys

import pytest
from explain_cases import write_run

from rowhaul.schedule.plan import KIND_NAMES

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


def lines_of(path, kind=None):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def test_a_run_in_one_process_is_explained_and_reported(rowhaul, log_folder, tmp_path):
    run, page = tmp_path / "run", tmp_path / "report.html"
    code, out, _ = rowhaul("train", "--data", log_folder, "--out", run, *SMALL, "--explain")
    assert code == 0
    assert "an iteration: compute" in out
    (detail,) = lines_of(run / "explain.jsonl", "detail")
    assert (detail["step"], detail["final"]) == (12, True)
    assert detail["iterations"] == 11  # without the first
    page.write_text("<!DOCTYPE html>old")
    code, out, _ = rowhaul("report", run, "--out", page)
    assert code == 0
    assert "dlrm trained in one process, 12 steps" in " ".join(out.split())
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]
    code, _, err = rowhaul("report", run, "--trace", tmp_path / "trace.json")
    assert code == 2
    assert "has no timeline to write to" in " ".join(err.split())
    assert not (tmp_path / "trace.json").exists()


def test_the_page_goes_into_the_run_by_default(rowhaul, tmp_path):
    run = write_run(tmp_path / "run")
    for _ in range(2):  # the second time in place of the first results
        code, out, _ = rowhaul("report", run, "--trace", tmp_path / "trace.json")
        assert code == 0
    assert "These 3 workers take 24 ms an iteration" in " ".join(out.split())
    assert (run / "report.html").is_file()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_bad_input_is_one_line(rowhaul, tmp_path):
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "nothing"], "does not exist; give the --out of a `rowhaul train`"),
        ([tmp_path / "empty"], "holds no run"),
        ([run, "--out", tmp_path / "empty"], "is a folder; give the name of a file in it"),
        ([run, "--out", tmp_path / "no" / "report.html"], "there is no folder"),
        ([run, "--out", run / "config.yaml"], "config.yaml exists and is something else than this command"),
        ([run, "--out", "/dev/null"], "--out /dev/null is not a regular file"),
        ([run, "--trace", run / "config.yaml"], "--trace"),
        (
            [run, "--out", tmp_path / "one", "--trace", tmp_path / "one"],
            "--out and --trace name the same file",
        ),
        ([run, "--out", "/proc/report.html"], "/proc/report.html cannot be written"),
    ):
        code, out, err = rowhaul("report", *arguments)
        assert code == 2
        assert out == ""
        assert message in " ".join(err.split())
        assert err.startswith("error: ")
    assert not (tmp_path / "no").exists()
    assert not (tmp_path / "one").exists()
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("places", [("--topology", "colocated"), ("--stores", "1", "--peer-to-peer")])
def test_a_cluster_explains_every_byte_that_it_logs(places, log_folder, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", run, *SMALL]
    options = ["--epochs", "3", "--workers", "2", *places, "--cache", "2500", "--threads", "1", "--explain"]
    options += ["--set", "log_every=1", "--eval-data", f"{log_folder}/test", "--eval-every", "10"]
    done = subprocess.run(
        list(map(str, [*command, *options])), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waited for" in done.stdout
    assert "rows, why" in done.stdout
    details = lines_of(run / "explain.jsonl", "detail")
    final = details[-1]
    assert [line["final"] for line in details] == [False] * (len(details) - 1) + [True]
    assert (final["step"], final["iterations"]) == (36, 36)
    assert sum(one[-1] for one in final["links"]) == sum(one[-1] for one in final["tables_moved"])
    # A line of the log has one iteration; there is none of the last one, which is over after the last line.
    logged = lines_of(run / "metrics.jsonl", "cluster")
    for kind in KIND_NAMES:
        for unit, column in (("rows", -2), ("bytes", -1)):
            moved = [line.get(f"{unit}/{kind}", 0) for line in logged]
            counted = sum(one[column] for one in final["links"] if one[2] == kind)
            assert sum(moved) <= counted <= sum(moved) + 3 * max(moved)
    for rank, role in enumerate(final["roles"]):
        for way, end in (("sent", 0), ("received", 1)):
            moved = [line.get(f"link/{role} {way} bytes", 0) for line in logged]
            counted = sum(one[-1] for one in final["links"] if one[end] == rank)
            assert sum(moved) <= counted <= sum(moved) + 3 * max(moved)
    hits = sum(line["hits"] for line in lines_of(run / "explain.jsonl", "interval"))
    assert hits == final["hits"]
    assert sum(final["samples"]) == lines_of(run / "metrics.jsonl", "train")[-1]["samples"]
    workers = final["ranks"][:2]
    assert all(one["iterations"] == 33 for one in workers)
    assert all(one["seconds"]["compute"] > 0 and one["seconds"]["cpu"] > 0 for one in workers)
    assert sum(count for *_, count in final["dense"]) > 33 * 16 * 4  # at least one layer's weights
    timelines = lines_of(run / "explain.jsonl", "timeline")
    assert timelines
    assert {one[0] for one in timelines[-1]["spans"]} == set(range(len(final["roles"])))
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    report = [sys.executable, "-m", "rowhaul", "report", run, "--out", page, "--trace", trace]
    done = subprocess.run(list(map(str, report)), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert 'class="timeline"' in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.slow
def test_a_worker_without_a_share_is_left_out_and_waits_for_nothing(log_folder, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", run, *SMALL]
    options = ["--epochs", "1", "--workers", "3", "--topology", "colocated", "--shares", "2,0,1"]
    options += ["--threads", "1", "--explain", "--set", "log_every=4"]
    done = subprocess.run(
        list(map(str, [*command, *options])), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "worker 1 in 100% of iterations" in done.stdout
    final = lines_of(run / "explain.jsonl", "detail")[-1]
    assert [(one["iterations"], one["left_out"]) for one in final["ranks"]] == [(9, 0), (0, 9), (9, 0)]
    assert not any(final["ranks"][1]["seconds"].values())
    for line in lines_of(run / "explain.jsonl", "interval"):
        assert line["ranks"][1]["iterations"] == 0


@pytest.mark.slow
def test_being_explained_changes_nothing_that_is_learned(log_folder, tmp_path):
    losses = []
    for options in ([], ["--explain"]):
        run = tmp_path / f"run{len(losses)}"
        command = [sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", run, *SMALL]
        command += ["--workers", "2", "--stores", "1", "--threads", "1", "--set", "log_every=1", *options]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in lines_of(run / "metrics.jsonl", "train")])
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]
