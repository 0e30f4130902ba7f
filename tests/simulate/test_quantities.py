"""Speeds, times and sizes as people write them, and what is said of those that are wrong."""

import pytest

from rowhaul._quantities import parse_bytes, parse_for_each, parse_number, parse_seconds, parse_speed
from rowhaul.errors import ConfigError
from rowhaul.schedule.topology import Topology
from rowhaul.simulate.links import Link, Links, parse_link, parse_links


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_speed, "5gbit", 5e9 / 8),
        (parse_speed, "0.5 Gbit/s", 5e8 / 8),
        (parse_speed, "100mbit", 1e8 / 8),
        (parse_speed, "600MB", 6e8),
        (parse_speed, "1MiB/s", 2**20),
        (parse_seconds, "50us", 5e-5),
        (parse_seconds, "50µs", 5e-5),
        (parse_seconds, "0.2ms", 2e-4),
        (parse_seconds, "1e-3s", 1e-3),
        (parse_seconds, "0", 0),
        (parse_bytes, "2GiB", 2**31),
        (parse_bytes, "40mb", 40_000_000),
        (parse_bytes, "1_000b", 1000),
        (parse_number, "0.5", 0.5),
    ],
)
def test_units(parse, text, value):
    assert parse(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_speed, "5", "has no unit"),
        (parse_speed, "5gbps", "unknown unit 'gbps'"),
        (parse_speed, "1Gb", "may mean bits or bytes; write 1Gbit or 1GB"),
        (parse_speed, "10 mb/s", "write 10 mbit or 10 mB"),
        (parse_speed, "fast", "not understood"),
        (parse_speed, "0gbit", "above 0"),
        (parse_speed, "-1gbit", "not negative"),
        (parse_speed, "nan gbit", "finite"),
        (parse_speed, "inf gbit", "finite"),
        (parse_speed, "1bit", "1kbit to 1000tbit"),
        (parse_speed, "1e300gbit", "1kbit to 1000tbit"),
        (parse_seconds, "1e308s", "at most 1,000,000s"),
        (parse_bytes, "1e30gb", "at most 1,000tb"),
        (parse_seconds, "5", "has no unit"),
        (parse_seconds, "5 minutes", "unknown unit"),
        (parse_seconds, "-5us", "not negative"),
        (parse_bytes, "2Gbit", "unknown unit"),
        (parse_number, "3 rows", "has a unit"),
        (parse_number, "", "not understood"),
    ],
)
def test_wrong_quantities_are_named_with_their_option(parse, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse(text, "--x")
    assert "--x" in str(caught.value)


def test_one_value_per_worker():
    assert parse_for_each("1,2*3", 4, "--x", parse_number) == (1, 2, 2, 2)
    assert parse_for_each("7", 3, "--x", parse_number) == (7, 7, 7)
    with pytest.raises(ConfigError, match=r"--links 5gbit\*4,1gbit\*2 names 6 workers, but there are 8"):
        parse_links("5gbit*4,1gbit*2", 8, "--links")
    for times in ("9" * 15, "9" * 5000):  # without making as many
        with pytest.raises(ConfigError, match=r"workers.* there are 8"):
            parse_links(f"5gbit*{times}", 8, "--links")
    with pytest.raises(ConfigError, match="closer together"):
        parse_links("1kbit,1tbit", 2, "--links")
    with pytest.raises(ConfigError, match="how many workers"):
        parse_links("5gbit*x", 8, "--links")


def test_links_have_a_speed_and_a_latency():
    assert parse_link("5gbit@0.2ms", "--links") == Link(5e9 / 8, 2e-4)
    assert [str(link) for link in parse_links("5gbit*1,500mbit@0.2ms*1", 2, "--links")] == [
        "5gbit",
        "500mbit@0.2ms",
    ]
    with pytest.raises(ConfigError, match="not understood"):
        parse_link("5gbit@", "--links")


def test_stores_are_no_bottleneck_unless_given():
    topology = Topology(2, num_stores=2)
    slow, fast = Link(10.0), Link(100.0)
    assert Links.make(topology, (slow, fast)).stores == (Link(110.0), Link(110.0))
    assert Links.make(topology, (slow, fast), (slow, slow)).stores == (slow, slow)
    with pytest.raises(ConfigError, match="1 stores, but there are 2"):
        Links.make(topology, (slow, fast), (slow,))
    with pytest.raises(ConfigError, match="3 workers, but there are 2"):
        Links.make(topology, (slow,) * 3)
    colocated = Topology(2, colocated=True)
    assert Links.make(colocated, (slow, fast)).stores == ()
    with pytest.raises(ConfigError, match="share the workers' links"):
        Links.make(colocated, (slow, fast), (slow,))


def test_classes_go_from_fast_to_slow():
    links = Links((Link(1.0), Link(9.0), Link(1.0), Link(9.0, 0.1)), ())
    assert list(links.classes().values()) == [(1,), (3,), (0, 2)]
