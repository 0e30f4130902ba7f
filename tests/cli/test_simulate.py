"""`rowhaul simulate` as a person types it."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.cli.simulate.options import check_brute_force
from rowhaul.cli.simulate.run import options_named
from rowhaul.errors import ConfigError

KINDS = ["miss_pull", "update_push", "evict_push", "peer_send"]


def test_the_issue_of_a_comparison(simulate, tmp_path):
    page, numbers = tmp_path / "costs.html", tmp_path / "costs.json"
    dispatch = "random,laia,esd:1,esd:0"
    code, out, err = simulate(
        "--dispatch", dispatch, "--json", numbers, "--report", page, "--reference", "laia"
    )
    assert code == 0, err
    for word in (
        *dispatch.split(","),
        "best subset",
        "difference to laia",
        "after the warm-up",
    ):
        assert word in " ".join(out.split())
    written = json.loads(numbers.read_text())
    assert written["settings"]["workers"] == 4
    assert written["settings"]["cache_capacity"] == round(0.6 * written["settings"]["distinct_rows"])
    names = [name + suffix for name in dispatch.split(",") for suffix in ("", "@best-subset")]
    assert [one["name"] for one in written["mechanisms"]] == names
    for one in written["mechanisms"]:
        assert one["iterations"] == 8
        for counts in (one["rows"], one["bytes"]):
            assert list(counts) == KINDS
            assert all(len(per_worker) == 4 for per_worker in counts.values())
        assert one["decision_ms"]["median"] <= one["decision_ms"]["p99"]
        assert 0 <= one["hit_ratio"] <= 1
        assert 0 < one["slowest_link_seconds"] <= one["cost_seconds"]
        assert sum(one["shares"]) == 200
    text = page.read_text()
    assert all(name in text for name in dispatch.split(","))
    assert text.count("<svg") == 4


def test_output_fits_narrow_terminals(simulate, monkeypatch):
    from rowhaul.cli.progress import console

    for width in (80, 120):
        monkeypatch.setattr(console, "_width", width)
        code, out, _ = simulate("--dispatch", "laia,esd:1")
        assert code == 0
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= width


def test_caches_in_percent_rows_and_bytes(simulate, tmp_path):
    def capacity(cache):
        out = tmp_path / f"{cache.strip('%')}.json"
        arguments = ("--dispatch", "laia", "--no-subsets", "--dim", "8", "--json", out)
        assert simulate("--cache", cache, *arguments)[0] == 0
        written = json.loads(out.read_text())
        settings = written["settings"]
        return settings["cache_capacity"], settings["cache_unit"], written["mechanisms"][0]["rows"]

    percent, unit, rows = capacity("50%")
    assert unit == "rows"
    assert capacity(str(percent)) == (percent, "rows", rows)
    assert capacity(f"{percent * 32}b") == (percent * 32, "bytes", rows)


def test_rows_are_pruned_as_training_over_so_many_iterations_prunes_them(simulate, tmp_path):
    moved = {}
    for name, options in {"whole": (), "pruned": ("--prune", "90%")}.items():
        path = tmp_path / f"{name}.json"
        arguments = ("--dispatch", "laia", "--no-subsets", "--iterations", "20", "--json", path)
        code, _, err = simulate(*arguments, *options)
        assert code == 0, err
        written = json.loads(path.read_text())
        moved[name] = sum(map(sum, written["mechanisms"][0]["bytes"].values()))
    assert written["settings"]["prune_period"] == 1
    assert 0 < moved["pruned"] < 0.8 * moved["whole"]


def test_optimizer_state_travels(simulate, tmp_path):
    moved = {}
    for optimizer in ("sgd", "adagrad"):
        out = tmp_path / f"{optimizer}.json"
        code, _, err = simulate("--optimizer", optimizer, "--dispatch", "laia", "--no-subsets", "--json", out)
        assert code == 0, err
        moved[optimizer] = json.loads(out.read_text())["mechanisms"][0]
    assert moved["sgd"]["rows"] == moved["adagrad"]["rows"]
    assert sum(moved["sgd"]["bytes"]["update_push"]) < sum(moved["adagrad"]["bytes"]["update_push"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--sync", "full"),
        ("--sync", "bounded:2"),
        ("--sync", "static"),
        ("--look-ahead", "0"),
        ("--look-ahead", "4", "--even-out", "--compute", "1us"),
        ("--colocated",),
        ("--colocated", "--peer-to-peer"),
        ("--stores", "2", "--store-links", "1gbit", "--dense-bytes", "1mb"),
        ("--first-touch", "off", "--admit-after", "2"),
        ("--hot", "20", "--policy", "emark"),
        ("--dim", "user=8,item=16,tags=4", "--shares", "80*2,20*2"),
        ("--dispatch", "laia-adaptive", "--decision-budget", "1us"),
        ("--iterations", "0"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_options_run(arguments, simulate, tmp_path):
    base = () if "--dispatch" in arguments else ("--dispatch", "esd:1")
    out = tmp_path / "x.json"
    code, _, err = simulate(*base, *arguments, "--no-subsets", "--json", out)
    assert code == 0, err
    (outcome,) = json.loads(out.read_text())["mechanisms"]
    assert sum(map(sum, outcome["bytes"].values())) > 0
    assert sum(outcome["shares"]) == 200
    given = {name.replace("-", "_") for name in " ".join(arguments).split() if name.startswith("--")}
    assert {name.strip("_") for name in given} <= set(json.loads(out.read_text())["settings"])


def test_plain_parquet_without_a_schema_or_label(simulate, log_folder, tmp_path):
    table = pq.read_table(log_folder / "part-0.parquet").select(["user", "item"])
    pq.write_table(table, tmp_path / "ids.parquet")
    arguments = ("--dispatch", "laia", "--no-subsets")
    code, _, err = simulate(*arguments, data=tmp_path / "ids.parquet")
    assert code == 2
    assert "--features" in err
    assert "--label" not in err  # there is no such option
    assert simulate(*arguments, "--features", "user,item", data=tmp_path / "ids.parquet")[0] == 0
    code, _, err = simulate(*arguments, "--features", "user,itme", data=tmp_path / "ids.parquet")
    assert code == 2
    assert "did you mean 'item'?" in err


@pytest.mark.parametrize("place", ["named", "beside"])
@pytest.mark.parametrize("narrowed", [(), ("--features", "a,b")])
@pytest.mark.parametrize(
    ("ids", "distinct"), [("[a, b, c]", 800), ("[{name: a, table: t}, {name: b, table: t}, c]", 400)]
)
def test_features_of_one_table_share_its_rows(ids, distinct, narrowed, place, simulate, tmp_path):
    rows = list(range(400))
    pq.write_table(pa.table({"a": rows, "b": rows, "c": [0] * 400}), tmp_path / "x.parquet")
    schema = tmp_path / ("schema.yaml" if place == "beside" else "named.yaml")
    schema.write_text(f"ids: {ids}\n")
    given = ("--schema", schema) if place == "named" else ()
    small = ("--workers", "2", "--links", "1gbit", "--batch-per-worker", "20", "--cache", "50%")
    options = ("--dispatch", "laia", "--no-subsets", "--json", "-", *given, *narrowed)
    code, out, err = simulate(*options, data=tmp_path / "x.parquet", small=small)
    assert code == 0, err
    counted = json.loads(out)["settings"]["distinct_rows"]  # bars are not on standard output
    assert counted == distinct + (0 if narrowed else 1)


def test_fewer_batches_than_asked_for_are_said(simulate):
    code, out, _ = simulate("--iterations", "1000", "--dispatch", "laia", "--no-subsets")
    assert code == 0
    assert "30 batches of 200 samples; 1,000 were asked for" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workers", "0"), "workers must be 1 to 64; got 0"),
        (("--workers", "65"), "got 65"),
        (("--links", "5gbit*4,1gbit*2"), "names 6 workers, but there are 4"),
        (("--links", "5"), "has no unit"),
        (("--links", "nan gbit"), "--links"),
        (("--links", "-5gbit"), "not negative"),
        (("--store-links", "1gbit*3"), "names 3 stores, but there are 1"),
        (("--colocated", "--store-links", "1gbit"), "share the workers' links"),
        (("--stores", "0"), "with --colocated there are none"),
        (("--stores", "1000000000"), "--stores is 1000000000; it must be 1 to 1,024"),
        (("--stores", "2", "--colocated"), "--stores 2 and --colocated exclude each other"),
        (("--links", "5gbit*999999999999999"), "names 999999999999999 workers, but there are 4"),
        (("--links", "5gbit*" + "9" * 5000), "too many workers; there are 4"),
        (("--links", "1e-300bit"), "out of range"),
        (("--links", "1kbit*2,1tbit*2"), "closer together"),
        (("--cache", "2"), "--cache"),
        (("--cache", "1%"), "--cache"),
        (("--cache", "100b"), "--cache"),
        (("--cache", "120%"), "at most 100%"),
        (("--cache", "0%"), "a cache needs room"),
        (("--cache", "1e30"), "too large"),
        (("--cache", "1e30gb"), "too large"),
        (("--cache", "-5"), "not negative"),
        (("--cache", "nan%"), "finite"),
        (("--cache", "plenty"), "--cache"),
        (("--dispatch", "esd:1.5"), "1.5"),
        (("--dispatch", "esd:-0.1"), "-0.1"),
        (("--dispatch", "esd:nan"), "nan"),
        (("--dispatch", "magic"), "known are random"),
        (("--dispatch", ","), "names no mechanism"),
        (("--dispatch", "laia,laia"), "twice"),
        (("--dispatch", "laia-adaptive:-1:20"), "laia-adaptive:-1:20"),
        (("--dispatch", "brute-force"), "all assignments of 200 samples to 4 workers"),
        (("--dispatch", "two-batch:brute-force"), "all assignments of 200 samples to 4 workers"),
        (("--policy", "fifo"), "lru"),
        (("--sync", "sometimes"), "on-demand"),
        (("--sync", "bounded:-1"), "bounded"),
        (("--sync", "bounded:" + "9" * 30), "at most 1,000,000 updates late"),
        (("--sync", "static:"), "static takes no settings"),
        (("--optimizer", "lion"), "known are sgd"),
        (("--reference", "esd:1"), "not among what is compared: laia"),
        (("--shares", "10*2,x*2"), "--shares"),
        (("--shares", "0*4"), "at least one worker"),
        (("--shares", "10,20"), "names 2 workers, but there are 4"),
        (("--shares", "best"), "equal, auto"),
        (("--shares", "1.5*4"), "whole number"),
        (("--compute", "-1us"), "not negative"),
        (("--compute", "nan s"), "finite"),
        (("--compute", "1e308s"), "at most 1,000,000s"),
        (("--dense-bytes", "-1mb"), "not negative"),
        (("--dim", "0"), "at least 1 value"),
        (("--dim", "1e30"), "at most 65,536"),
        (("--dim", "user=8,item=8,tags=8,user=16"), "table 'user' is named twice"),
        (("--features", ""), "--features '' has an empty name"),
        (("--features", ","), "--features ',' has an empty name"),
        (("--dim", "user=8"), "table 'item' has no dimension"),
        (("--dim", "usr=8,item=8,tags=8"), "no table 'usr'"),
        (("--batch-per-worker", "0"), "--batch-per-worker is 0"),
        (("--iterations", "-1"), "--iterations is -1"),
        (("--prune", "90%", "--prune-period", "0"), "--prune-period is 0; it must be at least 1"),
        (("--iterations", "4"), "leaves none of 4 iterations"),
        (("--warmup", "-1"), "--warmup is -1"),
        (("--iterations", "100", "--warmup", "40"), "the data holds 30 batches of 200 samples"),
        (("--look-ahead", "-1"), "look_ahead"),
        (("--admit-after", "0"), "admit_after"),
        (("--hot", "-1"), "--hot"),
        (("--seed", "-1"), "seed"),
        (("--decision-budget", "fast"), "--decision-budget"),
        (("--json", "nowhere/x.json"), "nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_named_and_leaves_nothing(arguments, said, simulate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = () if "--dispatch" in arguments else ("--dispatch", "laia")
    outputs = () if "--json" in arguments else ("--json", tmp_path / "x.json")
    code, _, err = simulate(*base, *outputs, "--report", tmp_path / "x.html", *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_an_empty_data_set_is_named(simulate, tmp_path):
    pq.write_table(pa.table({"user": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    code, _, err = simulate("--features", "user", data=tmp_path / "none.parquet")
    assert code == 2
    assert "hold no rows" in err


def test_wrong_sizes_are_found_before_rows_are_counted(simulate, monkeypatch):
    monkeypatch.setattr("rowhaul.cli.simulate.data.IdFiles.count_rows", lambda ids: pytest.fail("counted"))
    for dispatch, said in (("laia,laia", "names laia twice"), ("brute-force", "tries all assignments")):
        code, _, err = simulate("--dispatch", dispatch)
        assert code == 2
        assert said in err


def test_only_the_error_about_caches_names_their_options(simulate):
    options = "(--cache, --batch-per-worker, --workers)"
    assert options in simulate("--dispatch", "laia", "--cache", "2")[2]
    with pytest.raises(ConfigError) as caught, options_named():
        raise ConfigError("brute-force tries all assignments")
    assert str(caught.value) == "brute-force tries all assignments"


def test_brute_force_may_be_as_large_as_it_can_run():
    for num_workers, batch_size in ((1, 100_000), (2, 22), (4, 12)):  # 22 over 11 is 705,432
        check_brute_force(["laia", "brute-force"], num_workers, batch_size)
    for num_workers, batch_size in ((2, 24), (4, 16), (64, 8192)):  # 24 over 12 is 2,704,156
        check_brute_force(["laia"], num_workers, batch_size)
        with pytest.raises(ConfigError, match="brute-force"):
            check_brute_force(["laia", "brute-force"], num_workers, batch_size)


def test_names_are_printed_as_they_are_written(simulate):
    code, out, err = simulate("--dispatch", "laia-adaptive:100:20", "--no-subsets")
    assert code == 0, err
    assert "laia-adaptive:100:20" in out
    assert "💯" not in out


def test_the_help_tells_what_can_be_written(rowhaul, monkeypatch):
    from rowhaul.schedule.caches import POLICIES
    from rowhaul.schedule.dispatch import DISPATCHERS

    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)
    code, out, _ = rowhaul("simulate", "--help")
    assert code == 0
    for word in (*DISPATCHERS, *POLICIES, "emark:mark,latest,frequency", "5gbit@0.2ms", "laia@best-subset"):
        assert word in out
    assert "docs/simulate.md" in out.strip().splitlines()[-1]


def a_kernel_is_interrupted():
    """What numba makes of Ctrl-C."""
    raise SystemError("CPUDispatcher(...) returned a result with an exception set") from KeyboardInterrupt()


def ctrl_c():
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupt", [ctrl_c, a_kernel_is_interrupted])
def test_an_interrupt_leaves_nothing(interrupt, simulate, tmp_path, monkeypatch):
    from rowhaul.schedule import Scheduler

    plan, planned = Scheduler.plan, []

    def interrupted(scheduler):
        planned.append(scheduler)
        if len(planned) == 5:
            interrupt()
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "plan", interrupted)
    code, out, _ = simulate("--dispatch", "laia", "--json", tmp_path / "x.json")
    assert code == 130
    assert "interrupted; nothing was written" in out
    assert not list(tmp_path.iterdir())


def test_generated_logs_can_be_simulated(rowhaul, tmp_path):
    rowhaul("generate", "--preset", "movielens", "--rows", "3_000", "--out", tmp_path / "logs")
    code, out, err = rowhaul(
        "simulate", tmp_path / "logs", "--workers", "2", "--links", "1gbit", "--batch-per-worker", "64",
        "--cache", "50%", "--dispatch", "random,esd:1", "--warmup", "2", "--iterations", "8",
    )  # fmt: skip
    assert code == 0, err
    assert "esd:1" in out
    shutil.rmtree(tmp_path / "logs")
