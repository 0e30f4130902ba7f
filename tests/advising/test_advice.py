"""What is said of predictions: who wins, by how much, and from which speed of links on."""

import re

import pytest

from rowhaul._quantities import parse_speed
from rowhaul.advising.advice import WORTH, advise, helpful_speed
from rowhaul.advising.predict import SPEEDS, Prediction
from rowhaul.simulate.links import Link

LINKS = [Link(100e6 / 8)] * 8


def alone(seconds=0.1):
    return Prediction(1, "", 0, seconds, seconds, at_speed=(seconds,) * len(SPEEDS))


def several(machines, compute, transfer, dispatcher="joint"):
    """A step that takes its transfer in proportion to the links' speed."""
    by_speed = tuple(compute + transfer / speed for speed in SPEEDS)
    return Prediction(machines, dispatcher, 0, compute + transfer, compute, rows=transfer, at_speed=by_speed)


def test_one_machine_is_kept_where_links_are_too_slow_and_the_speed_that_helps_is_named():
    predictions = [alone(), several(2, 0.06, 0.2), several(4, 0.04, 0.3)]
    advice = advise(predictions, LINKS)
    assert advice.machines == 1
    assert advice.text.startswith(
        "stay with one machine: two would reach 0.38 times its speed; with links of "
    )
    needed = 0.2 / (0.1 / WORTH - 0.06)
    speed = helpful_speed(predictions, predictions[0], 2)
    assert speed == pytest.approx(needed, rel=0.05)
    assert speed >= needed
    assert advice.text.endswith("; with links of 550mbit or more, four would help")


@pytest.mark.parametrize("links", [LINKS, [Link(1e9 / 8), Link(100e6 / 8)]])
@pytest.mark.parametrize("transfer", [0.0354, 0.036, 0.07, 0.5])
def test_links_that_are_named_do_help(links, transfer):
    way = several(2, 0.06, transfer)
    text = advise([alone(), way], links).text
    if links is LINKS:
        named = parse_speed(re.search(r"links of (\S+) or more", text)[1], "links") * 8 / 100e6
    else:
        named = float(re.search(r"all links ([\d.]+) times as fast", text)[1])
    assert named > 1
    assert (0.06 + transfer / named) * WORTH <= 0.1


def test_a_step_of_seconds_is_said_in_seconds():
    assert advise([alone(1.5)], LINKS).text == "one machine: 1.5 s a step"


def test_links_that_could_not_help_are_not_named():
    advice = advise([alone(), several(2, 0.12, 0.001)], LINKS)
    assert advice.machines == 1
    assert "faster links alone would not change that" in advice.text


def test_links_that_are_much_too_slow_are_said_to_be():
    advice = advise([alone(), several(2, 0.05, 100.0)], LINKS)
    assert advice.text.endswith("; links of 25.6gbit would not be enough either")


def test_more_machines_are_taken_while_they_pay():
    advice = advise([alone(), several(2, 0.05, 0.01), several(4, 0.025, 0.01), several(8, 0.02, 0.02)], LINKS)
    assert advice.machines == 4
    assert advice.text == (
        "take four machines, with joint: 2.9 times as fast as one; eight would be 2.5 times as fast"
    )


def test_a_tie_goes_to_fewer_machines():
    assert advise([alone(), several(2, 0.097, 0.0)], LINKS).machines == 1


def test_memory_decides_where_one_machine_has_too_little():
    predictions = [alone(), several(2, 0.2, 0.2)]
    advice = advise(predictions, LINKS, lambda one: one.machines > 1)
    assert advice.machines == 2
    assert "one machine does not have the memory" in advice.text
    assert advise(predictions, LINKS, lambda one: False).text.startswith("not even 2 machines")


def test_memory_is_named_where_it_keeps_more_machines_from_being_taken():
    advice = advise([alone(), several(2, 0.05, 0.005)], LINKS, lambda one: one.machines == 1)
    assert advice.machines == 1
    assert advice.text == (
        "stay with one machine: two would reach 1.8 times its speed, but do not have the memory: a smaller "
        "--cache may help"
    )


def test_links_that_differ_are_named_by_how_many_times_as_fast_they_have_to_be():
    fast, slow = Link(1e9 / 8), Link(100e6 / 8)
    predictions = [alone(), several(2, 0.06, 0.05), several(4, 0.04, 5.0)]
    text = advise(predictions, [fast, fast, slow, slow]).text
    assert text.endswith(
        "; with links of 1.5gbit or more, two would help"
    )  # machines are taken from the front
    text = advise(predictions, [fast, slow, slow, slow]).text
    assert text.endswith("; with all links 1.5 times as fast, two would help")
    text = advise([alone(), several(2, 0.05, 100.0)], [fast, slow]).text
    assert text.endswith("; all links 256 times as fast would not be enough either")
