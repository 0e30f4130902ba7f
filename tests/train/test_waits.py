"""Which of reader and card waits for the other."""

from rowhaul.train.waits import Waits


def waits(loading, computing, steps=3):
    found = Waits()
    for _ in range(steps):
        found.loaded(loading)
        found.computed(computing)
    return found


def test_the_one_that_waits_is_named():
    assert waits(0.3, 0.1).text() == "the card for the reader, 75% of the time"
    assert waits(0.0, 0.1).text() == "the reader for the card, which waits 0% of the time"


def test_the_first_step_does_not_count():
    assert waits(0.3, 0.1, steps=1).text() == ""
    found = Waits()
    found.loaded(60.0)
    found.computed(30.0)
    found.loaded(0.1)
    found.computed(0.3)
    assert found.share == 0.25
