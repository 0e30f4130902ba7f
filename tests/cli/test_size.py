"""`rowhaul size` as a person types it."""

import json

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

TABLES = ("user", "item", "tags")
SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


@pytest.fixture
def size(rowhaul, log_folder):
    def run(*arguments):
        code, out, err = rowhaul("size", "--data", f"{log_folder}/*.parquet", *SMALL, *arguments)
        return code, out, " ".join(err.split())

    return run


def test_tables_and_the_process_are_told(size):
    code, out, _ = size("--memory", "16GiB")
    assert code == 0
    for words in ("user", "item", "tags", "dense model", "process", "of 16.0 GiB: it fits."):
        assert words in out
    assert "Distinct keys of 6,000 samples, counted to about 0.8%" in out


def test_json_has_all_numbers(size, log_folder):
    code, out, _ = size("--json")
    assert code == 0
    found = json.loads(out)
    log = pq.read_table(sorted(log_folder.glob("*.parquet")))
    distinct = {
        name: len(pc.unique(pc.list_flatten(log[name]) if name == "tags" else log[name])) for name in TABLES
    }
    assert {one["name"]: one["rows"] for one in found["tables"]} == pytest.approx(distinct, rel=0.016)
    assert found["fits"]
    assert found["needed"] == found["ranks"][0]["total"] == sum(found["ranks"][0]["parts"].values())


@pytest.mark.slow
def test_memory_of_a_card_is_counted(size):
    code, out, _ = size("--json")
    in_host_memory = json.loads(out)["ranks"][0]["parts"]
    code, out, _ = size("--device", "cuda", "--json")
    assert code == 0
    found = json.loads(out)
    rows = sum(one["rows"] for one in found["tables"])
    assert found["card"]["rows"] == rows * (4 + 1) * 4
    assert found["card"]["index"] == 21 * rows
    assert found["card"]["dense model"] == in_host_memory["dense model"]
    assert not {"rows", "index", "step"} & found["ranks"][0]["parts"].keys()
    code, out, _ = size("--device", "cuda", "--device-memory", "1MiB", "--json")
    found = json.loads(out)
    assert found["card"]["rows"] == 1 << 20
    assert found["ranks"][0]["parts"]["rows"] == in_host_memory["rows"]
    code, out, _ = size("--device", "cuda", "--device-memory", "1MiB")
    assert code == 0
    assert "on the card" in out
    code, _, err = size("--device-memory", "1MiB")
    assert code == 2
    assert "device_memory is 1MiB, but device is cpu" in err


def test_what_does_not_fit_is_refused_with_what_would_help(size):
    code, out, _ = size("--memory", "1MiB")
    assert code == 1
    assert "it does not fit. The bare process, Python with PyTorch, takes" in out
    code, out, _ = size("--set", "model.embedding_dim=60000", "--row-optimizer", "adam", "--memory", "8GiB")
    assert code == 1
    assert "Any one of these changes is enough:" in out
    assert "model.embedding_dim: " in out
    code, out, _ = size("--memory", "1MiB", "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False


@pytest.mark.parametrize(
    "settings",
    [
        ("--row-dtype", "int8"),  # wants rows of two values or more
        ("--prune", "50%"),  # and pieces of rows a value each
        ("--device", "cuda", "--device-memory", "1GiB"),  # which machines beside others do not have
    ],
)
def test_what_other_settings_refuse_is_not_suggested(settings, size):
    code, out, err = size("--memory", "1MiB", *settings)
    assert (code, "it does not fit" in out) == (1, True), err


@pytest.mark.slow
def test_a_cluster_is_told_rank_by_rank(size):
    code, out, _ = size("--workers", "2", "--stores", "2", "--cache", "1000", "--machines", "2", "--json")
    assert code == 0
    found = json.loads(out)
    assert [one["role"] for one in found["ranks"]] == ["worker", "worker", "store", "store"]
    assert [one["ranks"] for one in found["machines"]] == [[0, 1], [2, 3]]
    code, out, _ = size("--workers", "2", "--stores", "2", "--machines", "4", "--memory", "16GiB")
    assert code == 0
    assert "The fullest machine needs" in out


@pytest.mark.slow
def test_pruning_is_told_beside_what_there_would_be_without(size):
    code, out, _ = size("--prune", "90%", "--set", "prune.chunks=2", "--memory", "16GiB")
    assert code == 0
    assert out.count("unpruned") == 2  # a column of tables, and a line of ranks
    assert "Pruned: at most" in out
    code, out, _ = size("--memory-budget", "400KiB", "--set", "prune.tail=zeros", "--json")
    assert code == 0
    found = json.loads(out)
    parts = found["ranks"][0]["parts"]
    assert parts["rows"] + parts["index"] <= 400 << 10
    assert found["without_pruning"]["needed"] == found["without_pruning"]["ranks"][0]["total"]
    code, _, err = size("--memory-budget", "2KiB", "--set", "prune.tail=zeros")
    assert code == 2
    assert "prune.budget is 2,048 bytes, but one batch reads" in err


def test_a_budget_is_told_as_what_it_buys(size):
    code, out, _ = size("--memory-budget", "400KiB", "--memory", "16GiB")
    assert code == 0
    assert out.count("unpruned") == 2
    assert "ids can have a row of their own" in " ".join(out.split())
    code, out, _ = size("--memory-budget", "400KiB", "--json")
    assert code == 0
    parts = json.loads(out)["ranks"][0]["parts"]
    assert 360 << 10 < parts["rows"] + parts["index"] <= 400 << 10
    code, _, err = size("--memory-budget", "100b")
    assert code == 2
    assert "too few for" in err


@pytest.mark.slow
def test_policies_and_hot_rows_are_told(size):
    code, out, _ = size("--max-rows", "100", "--batch-size", "20", "--memory", "16GiB")
    assert code == 0
    assert "user: at most" in out
    assert "max_rows 100, and those of a batch" in " ".join(out.split())
    assert "policies" in out
    code, out, _ = size("--workers", "2", "--stores", "1", "--hot", "auto", "--memory", "16GiB")
    assert code == 0
    assert "Hot rows: counted at their upper limit" in out


@pytest.mark.slow
def test_a_sample_says_that_it_is_one(size):
    code, out, _ = size("--sample", "1000", "--memory", "16GiB")
    assert code == 0
    assert "Extrapolated from the first 1,000 of 6,000 samples" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--machines", "2"], "--machines is 2, but there are 1 ranks to put on them"),
        (["--machines", "0"], "--machines is 0"),
        (["--plot", "x.png"], "--plot is for probes; add --budgets"),
        (["--probe-steps", "300"], "--probe-steps is for probes; add --budgets"),
        (["--eval-data", "test"], "--eval-data is for probes; add --budgets"),
        (["--budgets", "1MiB", "--sample", "9"], "--sample is for the estimate, which is not made with"),
        (["--budgets", "1MiB", "--machines", "1"], "--machines is for the estimate"),
        (["--budgets", "1MiB", "--memory", "1GiB"], "--memory is for the estimate"),
        (["--sample", "1"], "--sample is 1; it must be at least 2"),
        (["--memory", "16"], "'16' has no unit"),
        (["--memory", "0"], "a machine needs memory"),
        (["--workers", "2", "--stores", "0"], "the number of stores must be at least 1"),
        (["--set", "batch=3"], "unknown setting batch"),
        (["--prune", "120%"], "prune.ratio must be a share"),
        (["--prune", "90%", "--ttl", "5"], "prune decides itself"),
        (["--set", "tables.users.ttl=5"], "there is no such table; did you mean user?"),
    ],
)
def test_bad_arguments_are_named(arguments, named, size):
    code, _, err = size(*arguments)
    assert code == 2
    assert named in err


def test_a_card_that_is_too_small_is_an_error_as_too_little_memory_is(size, monkeypatch):
    for card, fits in ((1 << 40, True), (1 << 10, False)):
        monkeypatch.setattr("rowhaul.cli.size.report.card_memory", lambda card=card: card)
        code, out, _ = size("--device", "cuda", "--memory", "16GiB")
        assert (code, "it does not fit: see --device-memory" in out) == (int(not fits), not fits)
        assert ("of 16.0 GiB: it fits." in out) == fits
        code, out, _ = size("--device", "cuda", "--memory", "16GiB", "--json")
        assert (code, json.loads(out)["fits"]) == (int(not fits), fits)
        assert size("--memory", "16GiB")[0] == 0  # of a run that is on no card
