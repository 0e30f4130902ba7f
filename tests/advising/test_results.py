"""What `rowhaul plan` says about its own numbers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rowhaul.advising.advice import Advice
from rowhaul.advising.page import _by_speed
from rowhaul.advising.predict import SPEEDS, Prediction
from rowhaul.advising.results import DISTURBED, Results
from rowhaul.simulate.links import parse_links


@pytest.mark.parametrize(
    ("two_machines", "is_given", "warns"), [(0.6, False, False), (0.45, False, True), (0.2, True, False)]
)
def test_more_than_linear_speed_was_measured_on_a_busy_machine(two_machines, is_given, warns):
    predictions = (Prediction(1, "", 0, 1.0, 1.0), Prediction(2, "joint", 0, two_machines, two_machines))
    machines = SimpleNamespace(share_cores=False, links=parse_links("1GB*2,100mbit", 3, "--links"))
    costs = SimpleNamespace(given=is_given)
    results = Results(500, 10, True, machines, costs, predictions, {}, 0, Advice(2, "take two"))
    assert results.headline == (DISTURBED if warns else "Take two.")
    assert results.notes[-1].startswith("Links of 8gbit, 100mbit a second")  # as bits, if bytes were given


@pytest.mark.parametrize(
    ("links", "axis"),
    [("1gbit", "Mbit/s of the links"), ("1gbit*2,100mbit", "speed of the links, times that given")],
)
def test_the_plot_over_speeds_fits_all_numbers_of_machines(links, axis):
    at_speed = tuple(1 / speed for speed in SPEEDS)
    predictions = (Prediction(1, "", 0, 1.0, 1.0), Prediction(2, "joint", 0, 1.0, 1.0, at_speed=at_speed))
    machines = SimpleNamespace(share_cores=False, links=parse_links(links, 3, "--links"))
    results = Results(
        500, 10, True, machines, SimpleNamespace(given=True), predictions, {}, 0, Advice(1, "one")
    )
    (shown,) = _by_speed(results).axes
    assert shown.get_xlabel() == axis


def test_one_machine_is_one_line_over_speeds_of_links_also_with_pruned_rows():
    at_speed = tuple(1 / speed for speed in SPEEDS)
    alone = Prediction(1, "", 0, 1.0, 1.0, at_speed=(1.0,) * len(SPEEDS))
    several = Prediction(2, "joint", 0, 1.0, 1.0, at_speed=at_speed)
    predictions = (alone, replace(alone, pruned=True), several, replace(several, pruned=True))
    machines = SimpleNamespace(share_cores=False, links=parse_links("1gbit", 3, "--links"))
    results = Results(
        500, 10, True, machines, SimpleNamespace(given=True), predictions, {}, 0, Advice(1, "one")
    )
    (shown,) = _by_speed(results).axes
    names = [text.get_text() for text in shown.get_legend().get_texts()]
    assert sorted(names) == ["2 machines, at their quickest", "one machine"]
