"""What to do, in words: from predictions for one machine and for several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rowhaul._quantities import seconds_text
from rowhaul.advising.predict import SPEEDS, Prediction, seconds_at
from rowhaul.simulate.links import Link

WORTH = 1.05  # more machines must be this much faster to be worth it
_STEPS = 64  # of the search for a speed, between two that were tried
_EXACT = 1e-9  # of a digit: what floating point may add to a number that has two already


@dataclass(frozen=True)
class Advice:
    """How many machines to take, and why."""

    machines: int
    text: str


def best_of(predictions: Sequence[Prediction], machines: int) -> Prediction:
    """The quickest way to train on a number of machines; of equals, the first."""
    return min((one for one in predictions if one.machines == machines), key=lambda one: one.seconds)


def advise(
    predictions: Sequence[Prediction],
    links: Sequence[Link],
    fits: Callable[[Prediction], bool] = lambda one: True,
) -> Advice:
    """Choose the number of machines; a tie goes to fewer.

    Args:
        predictions: of all numbers of machines; one machine is among them.
        links: of all machines; a number of them takes those in front.
        fits: whether the machines have the memory.
    """
    counts = sorted({one.machines for one in predictions})
    alone = best_of(predictions, 1)
    fitting = [one for one in predictions if fits(one)]
    if not fitting:
        return Advice(
            counts[-1],
            (f"not even {counts[-1]} machines have" if counts[-1] > 1 else "one machine does not have")
            + " enough memory: see `rowhaul size` for what would help",
        )
    roomy = sorted({one.machines for one in fitting})
    chosen = roomy[0]
    for count in roomy[1:]:
        if best_of(fitting, count).seconds * WORTH < best_of(fitting, chosen).seconds:
            chosen = count
    best = best_of(fitting, chosen)
    more = [count for count in counts if count > 1]
    if chosen == 1:
        if not more:
            return Advice(1, f"one machine: {seconds_text(best.seconds)} a step")
        other = min((best_of(predictions, count) for count in more), key=lambda one: one.seconds)
        ratio = alone.seconds / other.seconds
        text = f"stay with one machine: {_number(other.machines)} would reach {ratio:.2g} times its speed"
        if other.seconds * WORTH < alone.seconds:  # they were not chosen, so they do not fit
            return Advice(1, text + ", but do not have the memory: a smaller --cache may help")
        return Advice(1, text + _when_it_helps(predictions, alone, more, links))
    if roomy[0] > 1:
        reason = "one machine does not have the memory"
        return Advice(chosen, f"take {_number(chosen)} machines, with {best.name}: {reason}")
    ratio = alone.seconds / best.seconds
    text = f"take {_number(chosen)} machines, with {best.name}: {ratio:.2g} times as fast as one"
    larger = [count for count in more if count > chosen]
    if larger:
        other = best_of(predictions, larger[-1])
        text += f"; {_number(larger[-1])} would be {alone.seconds / other.seconds:.2g} times as fast"
    return Advice(chosen, text)


def helpful_speed(predictions: Sequence[Prediction], alone: Prediction, machines: int) -> float | None:
    """The speed of links, relative to theirs, at which a number of machines is worth it; None if none."""
    ways = [one for one in predictions if one.machines == machines]
    for power in range(len(SPEEDS) * _STEPS):
        speed = SPEEDS[0] * 2 ** (power / _STEPS)
        if speed > SPEEDS[-1]:
            break
        if min(seconds_at(one, speed) for one in ways) * WORTH < alone.seconds:
            return speed
    return None


def _when_it_helps(
    predictions: Sequence[Prediction], alone: Prediction, counts: Sequence[int], links: Sequence[Link]
) -> str:
    speeds = {count: helpful_speed(predictions, alone, count) for count in counts}
    found = {count: speed for count, speed in speeds.items() if speed is not None}
    if not found and min(one.compute for one in predictions if one.machines > 1) * WORTH < alone.seconds:
        return f"; {_links_at(links[: counts[-1]], SPEEDS[-1])} would not be enough either"
    if not found:
        return (
            "; faster links alone would not change that: a rank's own work, not its link, is the limit "
            "(larger batches would help)"
        )
    count = min(found, key=lambda one: (found[one], one))
    speed = _rounded(found[count], links[:count])
    more = " or more" if _are_equal(links[:count]) else ""
    return f"; with {_links_at(links[:count], speed)}{more}, {_number(count)} would help"


def _links_at(links: Sequence[Link], speed: float) -> str:
    """Name links that are so many times as fast."""
    if not _are_equal(links):
        return f"all links {speed:.3g} times as fast"
    return f"links of {Link(links[0].bytes_per_second * speed)}"


def _rounded(speed: float, links: Sequence[Link]) -> float:
    """A speed at which links have two digits, rounded up: what is less would not help."""
    given = links[0].bytes_per_second * 8 if _are_equal(links) else 1.0
    digit = 10.0 ** (math.floor(math.log10(given * speed)) - 1)
    return math.ceil(given * speed / digit - _EXACT) * digit / given


def _are_equal(links: Sequence[Link]) -> bool:
    return len({link.bytes_per_second for link in links}) == 1


def _number(count: int) -> str:
    names = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return names[count] if count < len(names) else str(count)
