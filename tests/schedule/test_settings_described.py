"""Settings as texts: equal where they mean the same, short, and different wherever plans would differ."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    RowPolicy,
    RowSizes,
    ScheduleSettings,
    Topology,
    make_dispatcher,
)
from rowhaul.schedule.dispatch import text_of
from rowhaul.schedule.dispatch.adaptive import LaiaAdaptive
from rowhaul.schedule.settings import differences


def chosen(**changes: object) -> ScheduleSettings:
    defaults = ScheduleSettings(
        topology=Topology(4),
        sizes=RowSizes(values=(8, 16), state=(0, 4)),
        prices=(1, 1, 10, 10),
        cache=CacheSettings(60),
        dispatcher="esd:1",
    )
    return replace(defaults, **changes)


CHANGES = {
    "topology": Topology(4, peer_to_peer=True),
    "sizes": RowSizes(values=(8, 16), state=(4, 0)),
    "prices": (1, 10, 1, 10),
    "cache": CacheSettings(60, policy="lfu"),
    "dispatcher": "esd:0.5",
    "sync": "bounded:1",
    "shares": (1, 1, 1, 2),
    "first_touch": False,
    "admit_after": 2,
    "policies": (RowPolicy(ttl=5), RowPolicy()),
    "look_ahead": 2,
    "hot": HotRows(np.array([0]), np.array([1])),
    "seed": 1,
}


@pytest.mark.parametrize("name", [field.name for field in fields(ScheduleSettings)])
def test_every_setting_is_described(name: str) -> None:
    different = differences(chosen().describe(), chosen(**{name: CHANGES[name]}).describe())
    assert len(different) == 1
    assert " here, " in different[0]


def test_settings_that_mean_the_same_have_the_same_description() -> None:
    same = chosen(
        dispatcher=make_dispatcher("esd"), cache=CacheSettings([60] * 4), shares=(1, 1, 1, 1), hot=None
    )
    assert same.describe() == chosen().describe()
    twice = HotRows(np.array([1, 0, 1]), np.array([5, 6, 5]))
    once = HotRows(np.array([0, 1]), np.array([6, 5]))
    assert chosen(hot=twice).describe()["hot"] == chosen(hot=once).describe()["hot"]
    assert all(len(text) < 120 for text in chosen(prices=tuple(range(1, 5))).describe().values())


def test_long_settings_are_told_apart_by_a_hash() -> None:
    many = [tuple(range(1, 64 + last)) for last in (1, 2)]
    texts = [
        chosen(topology=Topology(4), sizes=RowSizes(sizes, (0,) * len(sizes))).describe()["sizes.values"]
        for sizes in many
    ]
    assert texts[0] != texts[1]
    assert max(map(len, texts)) <= 80


@pytest.mark.parametrize(
    "text",
    [
        "random",
        "laia:threads=4",
        "laia-adaptive:8:refresh-every=3",
        "esd:1/3:mean",
        "esd:0.3",
        "joint:passes=3:future=0.1:objective=makespan",
        "two-batch:esd:0.5",
        "brute-force",
    ],
)
def test_the_text_of_a_dispatcher_makes_it_again(text: str) -> None:
    dispatcher = make_dispatcher(text)
    assert make_dispatcher(text_of(dispatcher)) == dispatcher


def test_a_dispatcher_made_elsewhere_has_no_text_but_a_name_and_a_class() -> None:
    class Mine(LaiaAdaptive):
        pass

    assert text_of(Mine()) is None
    described = chosen(dispatcher=Mine()).describe()["dispatcher"]
    assert described.startswith("laia-adaptive (")
    assert described.endswith("Mine)")
