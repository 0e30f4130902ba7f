"""Options that do nothing, or not what they seem to, are said to."""

import json

import pytest

QUICK = ("--dispatch", "laia", "--no-subsets", "--iterations", "6")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peer-to-peer", "--sync", "full"), "with --sync full rows always go home"),
        (("--peer-to-peer", "--sync", "bounded:2"), "with --sync bounded:2 rows always go home"),
        (("--peer-to-peer", "--sync", "static"), "with --sync static rows always go home"),
        (("--peer-to-peer", "--look-ahead", "0"), "with --look-ahead 0 rows always go home"),
        (("--policy", "belady", "--look-ahead", "0"), "the same as emark"),
        (("--even-out",), "--even-out has no effect with --look-ahead 1"),
        (("--decision-budget", "1ms"), "--decision-budget has no effect"),
        (
            ("--dispatch", "laia-adaptive:2", "--decision-budget", "1ms"),
            "only laia-adaptive without a number of tables and joint:auto use it",
        ),
        (
            ("--prune", "90%", "--prune-period", "7"),
            "--prune-period is 7 iterations, but the run ends after 6",
        ),
        (("--links", "0.5gbit,5gbit*3", "--subsets"), "list the machine to keep first"),
        (("--links", "0.5gbit,5gbit*3", "--shares", "0,1,1,1"), "in every sum even without a share"),
        (("--hot", "1000000"), "all of them are replicated"),
        (("--evict", "lfu"), "--evict lfu has no effect without --max-rows"),
        (("--prune-chunks", "2"), "--prune-chunks has no effect without --prune"),
        (("--prune-period", "3"), "--prune-period has no effect without --prune"),
        (("--sync", "static", "--policy", "lfu"), "with --sync static nothing is cached"),
        (
            ("--shares", "200*2,56*2"),
            "--shares add up to 512, not to the global batch of 200 samples, so they are taken as weights: "
            "the workers get 78*2,22*2.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_has_no_effect_is_said(arguments, said, simulate, tmp_path):
    code, out, err = simulate(*QUICK, *arguments, "--json", tmp_path / "x.json")
    assert code == 0, err
    assert said in " ".join(out.split())
    assert any(said in note for note in json.loads((tmp_path / "x.json").read_text())["notes"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--peer-to-peer",),
        ("--policy", "belady"),
        ("--even-out", "--look-ahead", "2"),
        ("--dispatch", "laia-adaptive", "--decision-budget", "1ms"),
        ("--dispatch", "two-batch:joint:auto", "--decision-budget", "1ms"),
        ("--prune", "90%"),
        ("--links", "0.5gbit,5gbit*3"),
        ("--links", "5gbit,0.5gbit*3", "--subsets"),
        ("--hot", "10"),
        ("--shares", "80*2,20*2"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_what_has_an_effect_needs_no_note(arguments, simulate, tmp_path):
    code, _, err = simulate(*QUICK, *arguments, "--json", tmp_path / "x.json")
    assert code == 0, err
    assert not json.loads((tmp_path / "x.json").read_text())["notes"]


def test_belady_that_sees_nothing_is_emark(simulate, tmp_path):
    outcomes = []
    for policy in ("belady", "emark"):
        out = tmp_path / f"{policy}.json"
        arguments = ("--policy", policy, "--look-ahead", "0", "--cache", "20%", "--json", out)
        code, _, err = simulate(*QUICK, *arguments)
        assert code == 0, err
        outcomes.append(json.loads(out.read_text())["mechanisms"][0])
    assert outcomes[0]["rows"] == outcomes[1]["rows"]
    assert outcomes[0]["series"]["cost_seconds"] == outcomes[1]["series"]["cost_seconds"]
