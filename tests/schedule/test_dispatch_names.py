"""Dispatchers by name: `name[:value...][:key=value...]`."""

from fractions import Fraction

import pytest

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch import DISPATCHERS, make_dispatcher, with_settings
from rowhaul.schedule.dispatch.adaptive import LaiaAdaptive
from rowhaul.schedule.dispatch.brute_force import BruteForce
from rowhaul.schedule.dispatch.esd import Esd
from rowhaul.schedule.dispatch.laia import Laia
from rowhaul.schedule.dispatch.random import Random
from rowhaul.schedule.dispatch.round_robin import RoundRobin
from rowhaul.schedule.dispatch.two_batches import TwoBatches


@pytest.mark.parametrize(
    ("text", "dispatcher"),
    [
        ("random", Random()),
        ("round-robin", RoundRobin()),
        ("laia", Laia()),
        ("laia:threads=4", Laia(threads=4)),
        ("laia:4", Laia(threads=4)),
        ("laia-adaptive", LaiaAdaptive()),
        ("laia-adaptive:8", LaiaAdaptive(tables_scored=8)),
        ("laia-adaptive:8:threads=2", LaiaAdaptive(tables_scored=8, threads=2)),
        ("laia-adaptive:refresh-every=7", LaiaAdaptive(refresh_every=7)),
        ("esd", Esd()),
        ("esd:0.125", Esd(Fraction(1, 8))),
        ("esd:1:min3-min", Esd(Fraction(1), "min3-min")),
        ("esd:criterion=mean", Esd(criterion="mean")),
        ("brute-force", BruteForce()),
        ("two-batch:esd:0.5:mean", TwoBatches(Esd(Fraction(1, 2), "mean"))),
    ],
)
def test_a_name_makes_its_dispatcher(text, dispatcher):
    made = make_dispatcher(text)
    assert made == dispatcher
    assert text.startswith(made.name)
    assert made.name in DISPATCHERS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"unknown dispatcher ''; known are random, round-robin, laia, .* two-batch"),
        ("lia", r"unknown dispatcher 'lia'; known are random, round-robin, laia, .* two-batch"),
        ("two-batch", r"unknown dispatcher ''"),
        ("two-batch:lia", r"unknown dispatcher 'lia'"),
        ("random:3", r"random does not know what to do with '3'; random takes no settings"),
        (
            "esd:1:mean:2",
            r"esd does not know what to do with '2'; esd takes alpha \(a number\), criterion \(",
        ),
        (
            "laia:thread=2",
            r"laia does not know what to do with 'thread=2'; laia takes threads \(a whole number\)",
        ),
        ("laia-adaptive:ranking=3", r"takes tables_scored \(a whole number\), refresh_every .*, threads"),
        ("laia:2:threads=3", r"laia:2:threads=3 sets threads twice"),
        ("laia:two", r"laia:two sets threads to 'two'; a whole number is needed"),
        ("esd:half", r"esd:half sets alpha to 'half'; a number is needed"),
        ("esd:1/0", r"esd:1/0 sets alpha to '1/0'; a number is needed"),
        ("esd:nan", r"a number is needed"),
        ("esd:1.01", r"^esd:1.01: alpha is .* from 0 to 1; got 1.01"),
        ("esd:-1", r"from 0 to 1; got -1"),
        ("esd:1:max", r"sets criterion to 'max'; min2-min or min3-min or min3-min2 or mean is needed"),
        ("laia:0", r"takes 1 to 64 threads"),
        ("laia-adaptive:-1", r"tables_scored must not be negative; got -1"),
        ("laia-adaptive:refresh-every=0", r"refresh_every must be at least 1 iteration; got 0"),
    ],
)
def test_a_wrong_name_or_setting_says_what_is_right(text, message):
    with pytest.raises(ConfigError, match=message):
        make_dispatcher(text)


def test_settings_can_be_changed_under_way():
    assert with_settings(Esd(), alpha=Fraction(1, 2)) == Esd(Fraction(1, 2))
    with pytest.raises(ConfigError, match="laia has no setting alpha"):
        with_settings(Laia(), alpha=1)
