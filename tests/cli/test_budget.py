"""`--memory-budget`: from the command line to a run that is resumed, looked into, evaluated and exported."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from rowhaul.cli.run import RunOptions
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, Trainer

SMALL = ("--batch-size", "250", "--set", "model.options.top=[16]")


@pytest.fixture
def trained(rowhaul, log_folder, tmp_path):
    out = tmp_path / "run"
    code, printed, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", out, "--memory-budget", "8KiB", *SMALL,
        "--eval-data", log_folder / "test",
    )  # fmt: skip
    assert code == 0, errors
    return out, " ".join(printed.split())


def test_how_rows_are_held_is_decided_said_and_kept(trained, rowhaul, log_folder):
    out, printed = trained
    config = TrainConfig.read(out / "config.yaml")
    assert config.row_dtype == config.held_in == "float32"  # most ids of the log are rare
    assert config.prune.shared < TrainConfig().prune.shared
    assert "embedding_dim stays 16, in float32" in printed
    assert "ids have a row of their own" in printed
    code, printed, errors = rowhaul("train", "--out", out, "--resume", "--set", "epochs=2")
    assert code == 0, errors
    assert "embedding_dim" not in printed
    resumed = TrainConfig.read(out / "config.yaml")
    assert (resumed.prune, resumed.row_dtype) == (config.prune, config.row_dtype)


def test_a_configuration_file_resumes_what_it_began(rowhaul, log_folder, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"batch_size": 250, "prune": {"budget": "8KiB"}}))
    given = ("train", file, "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run")
    assert rowhaul(*given)[0] == 0
    code, _, errors = rowhaul(*given, "--resume", "--set", "epochs=2")
    assert code == 0, errors


def test_a_ratio_that_is_repeated_resumes_the_budget_that_was_made_of_it(rowhaul, log_folder, tmp_path):
    given = ("train", "--data", log_folder, "--out", tmp_path / "run", "--set", "prune.tail=shared", *SMALL)
    code, _, errors = rowhaul(*given, "--prune", "50%", "--max-steps", "2")
    assert code == 0, errors
    begun = TrainConfig.read(tmp_path / "run" / "config.yaml").prune
    for ratio in (("--prune", "50%"), ("--set", "prune.ratio=0.5")):
        code, printed, errors = rowhaul(*given, *ratio, "--max-steps", "2", "--resume")
        assert code == 0, errors
        assert f"memory budget: {begun.budget}, which the run made of its --prune" in printed
        assert TrainConfig.read(tmp_path / "run" / "config.yaml").prune == begun


def test_options_leave_the_settings_of_the_resumed_run_alone():
    resumed = TrainConfig().to_dict()
    options = RunOptions(None, [], None, None, None, ["model.options.dropout=0.5"], {"embedding_dim": 2})
    assert options.read_config(resumed).model.embedding_dim == 2
    assert resumed == TrainConfig().to_dict()


def test_ids_that_wait_for_a_row_have_the_initial_tail(log_folder, log_schema):
    """`prune.tail: initial` is what tables with `admit_after` do, by whatever name."""
    tables = {"default": {"admit_after": 3}}
    scores = []
    for settings in ({}, {"prune": {"tail": "initial"}, "on_unknown": "tail"}):
        config = TrainConfig.from_dict({"batch_size": 250, "tables": tables, **settings})
        trainer = Trainer(config, log_schema)
        for samples in SampleStream(log_folder, log_schema, 250, limit=1000):
            trainer.train_step(Batch.from_samples(samples))
        trainer.model.eval()
        with torch.no_grad():
            unseen = SampleStream(f"{log_folder}/test", log_schema, 200, limit=200)
            scores += [trainer.model(Batch.from_samples(one)) for one in unseen]
    assert torch.equal(*scores)


def test_a_stream_has_rows_as_configured(rowhaul, log_folder, tmp_path):
    """Its ids cannot be counted first; what was decided is kept all the same."""
    code, printed, errors = rowhaul(
        "train", "--data", log_folder, "--follow", "--stop-when-idle", "0.3s", "--out", tmp_path / "run",
        "--memory-budget", "8KiB", *SMALL,
    )  # fmt: skip
    assert code == 0, errors
    assert "embedding_dim stays 16, in int8" in " ".join(printed.split())
    config = TrainConfig.read(tmp_path / "run" / "config.yaml")
    assert (config.model.embedding_dim, config.held_in, config.prune.period) == (16, "int8", 200)


def test_what_is_given_stays(rowhaul, log_folder, tmp_path):
    code, printed, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run", "--memory-budget", "8KiB",
        "--embedding-dim", "16", "--row-dtype", "float32", *SMALL,
    )  # fmt: skip
    assert code == 0, errors
    assert "instead of" not in printed
    config = TrainConfig.read(tmp_path / "run" / "config.yaml")
    assert (config.model.embedding_dim, config.held_in) == (16, "float32")


def test_a_run_within_a_budget_is_looked_into(trained, rowhaul, log_folder):
    out, _ = trained
    code, printed, errors = rowhaul("ckpt", "ls", out)
    assert code == 0, errors
    assert "within a budget of 8.0 KiB" in " ".join(printed.split())
    code, printed, errors = rowhaul("ckpt", "cat", out, "7919", "--table", "user")
    assert code == 0, errors
    assert "its own, slot" in printed
    code, printed, errors = rowhaul("ckpt", "cat", out, "123456789", "--table", "user", "--json")
    assert code == 0, errors
    assert json.loads(printed)["rows"][0]["row"] < 0
    code, _, errors = rowhaul("ckpt", "convert", out, "--row-dtype", "float32", "--out", out.parent / "x")
    assert code != 0
    assert "have a budget" in " ".join(errors.split())
    code, _, errors = rowhaul("ckpt", "merge", out, out, "--out", out.parent / "merged")
    assert code != 0
    assert "cannot be merged" in " ".join(errors.split())


def test_it_is_evaluated_predicted_and_exported(trained, rowhaul, log_folder, tmp_path):
    out, printed = trained
    code, evaluated, errors = rowhaul("evaluate", out, "--data", log_folder / "test")
    assert code == 0, errors
    auc = printed.partition("AUC ")[2].split()[0].rstrip(",")
    assert auc in evaluated
    code, _, errors = rowhaul("export", out, "--out", tmp_path / "exported")
    assert code == 0, errors
    code, _, errors = rowhaul("evaluate", tmp_path / "exported", "--data", log_folder / "test")
    assert code == 0, errors
    code, _, errors = rowhaul(
        "predict", out, "--data", log_folder / "test", "--out", tmp_path / "scores.parquet"
    )
    assert code == 0, errors


def test_a_ratio_may_have_a_shared_tail(rowhaul, log_folder, tmp_path):
    code, printed, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run", "--prune", "70%",
        "--set", "prune.tail=shared", *SMALL,
    )  # fmt: skip
    assert code == 0, errors
    assert "70% less than" in printed
    config = TrainConfig.read(tmp_path / "run" / "config.yaml")
    assert config.prune.ratio == "0"
    assert config.prune.budget.endswith("b")


def test_rules_for_chunks_mean_zeros_as_they_did():
    old = {"budget": "2GiB", "ratio": "0", "chunks": 4, "enforcement": 0.05, "period": 1000}
    config = TrainConfig.from_dict({"prune": old})
    assert not config.prune.is_shared
    assert config.row_settings().row_format == "chunked"
    assert TrainConfig.from_dict({"prune": {"budget": "2GiB"}}).row_settings().row_format == "slots-int8"
    double = TrainConfig.from_dict({"prune": {"budget": "2GiB"}, "precision": "float64"})
    assert double.row_settings().row_format == "slots"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["prune.tail=shared", "prune.chunks=2"], "prune.chunks is a rule for chunks"),
        (["prune.tail=shared"], "give a budget (2GiB)"),
        (["prune.tail=sometimes"], "prune.tail must be one of auto, shared, zeros, initial"),
        (["prune.shared=0.1"], "prune.shared is 0.1"),
        (["prune.tail=initial"], "set tables.default.admit_after to the sightings"),
        (["prune.tail=initial", "prune.budget=1MiB"], "set prune.tail to shared or zeros"),
        (["prune.tail=initial", "prune.ratio=90%"], "set prune.tail to shared or zeros"),
        (["prune.budget=1MiB", "on_unknown=error"], "set it to tail, which is what both read"),
        (["prune.budget=1KiB", "prune.shared=0.95"], "prune.shared must be a share above 0"),
        (["prune.budget=100b"], "give at least"),
        (["prune.budget=1MiB", "tables.default.ttl=10"], "leave out one of them"),
        (["prune.budget=1MiB", "cluster.workers=2", "cluster.sync=bounded:2"], "cluster.sync is bounded:2"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message, rowhaul, log_folder, tmp_path):
    given = [word for one in settings for word in ("--set", one)]
    code, _, errors = rowhaul("train", "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run", *given)
    assert code == 2
    assert message in " ".join(errors.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_take_what_was_decided(rowhaul, log_folder, tmp_path):
    out = tmp_path / "run"
    code, _, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", out, "--workers", 2, "--stores", 1,
        "--memory-budget", "8KiB", *SMALL, "--eval-data", log_folder / "test",
    )  # fmt: skip
    assert code == 0, errors
    config = TrainConfig.read(out / "config.yaml")
    assert (config.row_dtype, TrainConfig().row_dtype) == ("float32", "auto")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (measured,) = (line for line in lines if line["kind"] == "eval")
    code, printed, errors = rowhaul("evaluate", out, "--data", log_folder / "test")
    assert code == 0, errors
    assert f"{measured['auc']:.4f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [("--memory-budget", "8KiB"), ("--prune", "95%", "--set", "prune.tail=shared")]
)
def test_ranks_that_torchrun_has_started_take_what_rank_0_decides(given, trained, log_folder, tmp_path):
    out = tmp_path / "ranks"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    files = ("--data", f"{log_folder}/*.parquet", "--out", str(out), "--data-from", "rank0")
    ended = subprocess.run(
        [*torchrun, "-m", "rowhaul", "train", *files, "--stores", "1", *given, *SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "memory budget: " in ended.stdout
    config, alone = TrainConfig.read(out / "config.yaml"), TrainConfig.read(trained[0] / "config.yaml")
    assert config.prune.period == alone.prune.period
    if given[0] == "--memory-budget":
        assert config.prune == alone.prune
        assert config.model == alone.model
    else:
        assert config.prune.ratio == "0"
